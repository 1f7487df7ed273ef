"""The experts that a mixture's routers chose, as they cross the wire."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

UNKNOWN = {"B": 0xFF, "H": 0xFFFF}
"""By type of the ids, what stands for an unknown choice: the trainer's own router chooses there."""

_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")
"""The names that vLLM knows in a model's config.json."""


class Routes(msgspec.Struct, frozen=True, array_like=True):
    """The experts of consecutive tokens in every layer, `[num_rows, num_layers, per_token]`.

    A row belongs to the token whose hidden states were routed so: the row of a sequence's last token is missing, since
    the engine never computed it.

    num_layers: decoder layers of the model; one without experts has ids that nothing reads.
    per_token: experts per token and layer.
    kind: of an id: "B" is uint8, "H" uint16, both little-endian.
    ids: their bytes.
    """

    num_layers: int
    per_token: int
    kind: str
    ids: bytes

    @property
    def row_bytes(self) -> int:
        return self.num_layers * self.per_token * (1 if self.kind == "B" else 2)

    @property
    def num_rows(self) -> int:
        return len(self.ids) // self.row_bytes

    def part(self, start: int, end: int | None = None) -> "Routes":
        """Returns the rows from `start` to before `end`."""
        size = self.row_bytes
        return msgspec.structs.replace(self, ids=self.ids[size * start : None if end is None else size * end])

    def problem(self, num_rows: int) -> str | None:
        """Returns why these are no routes of `num_rows` tokens; None if they are."""
        if self.kind not in UNKNOWN or self.num_layers < 1 or self.per_token < 1:
            return f"{self.num_layers} layers, {self.per_token} experts of kind {self.kind!r}, expected kind 'B' or 'H'"
        if len(self.ids) != num_rows * self.row_bytes:
            return f"{len(self.ids):,} bytes, expected {num_rows:,} rows of {self.row_bytes}"
        return None


def shape_in(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Returns layers, experts and experts per token by a text model's config.json; 0 experts for a dense model."""
    experts, per_token = (next((int(config[n]) for n in names if config.get(n)), 0) for names in (_EXPERTS, _PER_TOKEN))
    return int(config.get("num_hidden_layers", 0)), experts, per_token


def row_bytes(num_layers: int, num_experts: int, per_token: int) -> int:
    """Returns the bytes of one token's routes; 0 for a model without experts."""
    return Routes(num_layers, per_token, kind_of(num_experts), b"").row_bytes if num_experts else 0


def kind_of(num_experts: int) -> str:
    """Returns the narrowest kind that holds every expert's id and `UNKNOWN`."""
    return next(kind for kind, unknown in UNKNOWN.items() if num_experts <= unknown)


def joined_routes(parts: Iterable[Routes | None]) -> Routes | None:
    """Joins the routes of consecutive tokens: either all parts have them or none has."""
    known = [part for part in parts if part is not None]
    return msgspec.structs.replace(known[0], ids=b"".join(part.ids for part in known)) if known else None
