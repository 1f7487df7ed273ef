"""The settings of one leg of the suite."""

import msgspec


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """One run under faults. The seed also decides what it runs on, unless `server` is given.

    with_ranks: the trainer is sharded. with_long: rollouts take seconds, and the faults are producers that end in the
    middle of them.
    only: the one kind of fault there is.
    broken: the protocol is broken in this way; see roles.py.
    limit_s: so long may the run need, after the faults, to move again and to end.
    """

    seed: int
    num_faults: int = 44
    mean_gap_s: float = 1.6
    with_vllm: bool = False
    with_ranks: bool = False
    with_long: bool = False
    server: str | None = None
    only: str | None = None
    broken: str | None = None
    limit_s: float = 90.0

    @property
    def with_standby(self) -> bool:
        return self.seed % 2 == 0

    @property
    def appendfsync(self) -> str:
        return "always" if self.seed % 4 == 0 else "everysec"

    @property
    def arguments(self) -> str:
        """Those of the command that runs this leg alone."""
        words = [f"--seed {self.seed} --faults {self.num_faults} --gap {self.mean_gap_s}"]
        words += ["--vllm"] * self.with_vllm + ["--ranks"] * self.with_ranks + ["--long"] * self.with_long
        options = {"--server": self.server, "--only": self.only and repr(self.only), "--break": self.broken}
        return " ".join([*words, *(f"{option} {value}" for option, value in options.items() if value)])

    @property
    def name(self) -> str:
        return f"seed-{self.seed}" + (f"-without-{self.broken}" if self.broken else "")
