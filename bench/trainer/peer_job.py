"""The messages between the trainer section and TRL's process; imports what both environments have."""

import msgspec


class TrlJob(msgspec.Struct, frozen=True, kw_only=True):
    run_file: str
    updates: int
    num_threads: int


class PeerUpdates(msgspec.Struct, frozen=True, kw_only=True):
    """seconds, tokens: of each update; tokens are sampled ones that it trains. phases_s: of the mean update."""

    name: str
    seconds: list[float]
    tokens: list[int]
    phases_s: dict[str, float]

    @property
    def s_per_update(self) -> float:
        return sum(self.seconds) / len(self.seconds)

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / sum(self.seconds)
