"""The settings of one leg of the suite."""

import msgspec


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """One run under faults. The seed also determines server, fsync and standby; `server` overrides it.

    with_ranks: the trainer is sharded.
    only: the only kind of fault.
    broken: how the protocol is broken; see roles.py.
    limit_s: the time that the run may take, after the faults, to continue and to finish.
    """

    seed: int
    num_faults: int = 44
    mean_gap_s: float = 1.6
    with_ranks: bool = False
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
        """The arguments of the command that runs this leg alone."""
        words = [f"--seed {self.seed} --faults {self.num_faults} --gap {self.mean_gap_s}"]
        words += ["--ranks"] * self.with_ranks
        options = {"--server": self.server, "--only": self.only and repr(self.only), "--break": self.broken}
        return " ".join([*words, *(f"{option} {value}" for option, value in options.items() if value)])

    @property
    def name(self) -> str:
        return f"seed-{self.seed}" + (f"-without-{self.broken}" if self.broken else "")
