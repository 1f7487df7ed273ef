"""Writes the tables and the picture of docs/sizing.md, the trainer's memory by arithmetic: `python docs/sizing.py`.

What was measured comes from the newest result of `python -m bench.sizing`.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from penstock.deploy.report import drawing
from penstock.deploy.report.figures import STYLE

PAGE = Path(__file__).with_name("sizing.md")
PICTURE = Path(__file__).with_name("sizing.svg")
RESULTS = Path(__file__).parents[1] / "bench" / "results"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
DEVICES_GB = (80, 141)
USABLE = 0.9
"""Share of a device that is left beside the CUDA context, NCCL's buffers and what the allocator cannot use."""
RANKS = (1, 2, 4, 8)
WITH_A_SECOND_NODE = (*RANKS, 16)
PASS_TOKENS = 8192
"""The default of `trainer.tokens_per_microbatch`."""


class Shape(NamedTuple):
    """A model's shape, by the fields of its config.json.

    intermediate: of one expert where there are some. has_head_norms: a norm of queries and keys, as in Qwen3.
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    has_head_norms: bool = True
    experts: int = 0
    experts_per_token: int = 0

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def block_parameters(self) -> int:
        attention = 2 * self.hidden * (self.query_width + self.key_width) + 2 * self.head_dim * self.has_head_norms
        mlp = 3 * self.hidden * self.intermediate * (self.experts or 1) + self.hidden * self.experts
        return attention + mlp + 2 * self.hidden

    @property
    def root_parameters(self) -> int:
        """Embedding, head and last norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.block_parameters + self.root_parameters


# As published at huggingface.co: Qwen/Qwen3-*, meta-llama/Llama-3.1-70B.
SHAPES = (
    Shape("Qwen3-0.6B", 1024, 3072, 28, 16, 8, 128, 151936, tied=True),
    Shape("Qwen3-1.7B", 2048, 6144, 28, 16, 8, 128, 151936, tied=True),
    Shape("Qwen3-4B", 2560, 9728, 36, 32, 8, 128, 151936, tied=True),
    Shape("Qwen3-8B", 4096, 12288, 36, 32, 8, 128, 151936, tied=False),
    Shape("Qwen3-14B", 5120, 17408, 40, 40, 8, 128, 151936, tied=False),
    Shape("Qwen3-32B", 5120, 25600, 64, 64, 8, 128, 151936, tied=False),
    Shape("Qwen3-30B-A3B", 2048, 768, 48, 32, 4, 128, 151936, tied=False, experts=128, experts_per_token=8),
    Shape("Llama-3.1-70B", 8192, 28672, 80, 64, 8, 128, 128256, tied=False, has_head_norms=False),
)


class Setting(NamedTuple):
    """What a rank's memory depends on beside the model.

    dtype: `model.dtype`. tokens: of a pass. unsharded: gradients are reduced once an optimizer step.
    """

    ranks: int
    tokens: int = PASS_TOKENS
    dtype: str = "bfloat16"
    checkpointing: bool = True
    unsharded: bool = False
    on_cuda: bool = True


def block_bytes_per_token(shape: Shape, dtype: str) -> int:
    """What autograd keeps of one block for its backward pass. b bytes an element of `dtype`:

    norms         2 hidden (4 + 2b)                  input in float32, normalized, output; each of the two
    attention     3b query + 2b key                  what goes in, grouped into rows; what comes out
    head norms    (4 + b)(query + key)               where a model has them
    MLP           4b intermediate                    gate, up, activation, product
    experts       k (4b intermediate + 2b hidden)    of the k that a token meets, with what is gathered for them
    """
    b = DTYPE_BYTES[dtype]
    query, key, experts = shape.query_width, shape.key_width, shape.experts_per_token
    kept = 2 * shape.hidden * (4 + 2 * b) + 3 * b * query + 2 * b * key + 4 * b * shape.intermediate * (experts or 1)
    # One float32 a norm and a head: reciprocal roots, attention's normalizer.
    kept += 8 + 4 * shape.heads + shape.has_head_norms * ((4 + b) * (query + key) + 4 * (shape.heads + shape.kv_heads))
    return kept + 2 * b * shape.hidden * experts


def rank_bytes(shape: Shape, setting: Setting) -> dict[str, float]:
    """The peak of one rank's memory by what it is for. With b bytes an element of `dtype`, N ranks, T tokens a pass:

    masters, gradients, moments   16 parameters / N                  float32: one, one, two
    gathered all the while        b root                             of one rank b parameters in bfloat16, rounded for a
                                                                     pass, and nothing in float32
    unsharded gradients           4 parameters                       where the ranks add them up once a step
    activations                   T (b hidden layers)                the blocks' inputs, with checkpointing
                                  T layers (block's bytes a token)   without
                                  T (3b + 16) hidden                 embeddings, last norm, the head's inputs, gradients
    the largest of                logits, 4 vocabulary hidden        the head, with its weight's gradient
                                  2b block + (b + 4) block + b root  a block: it and the next one gathered, its gradient
                                  + T (block's bytes a token)        twice, in `dtype` and float32, and the head's; what
                                                                     checkpointing computes again
                                  (b + 4) root                       the gradients of embedding and head, at the end
    """
    b, n, tokens = DTYPE_BYTES[setting.dtype], setting.ranks, setting.tokens
    block, root, whole = shape.block_parameters, shape.root_parameters, shape.parameters
    per_block = tokens * block_bytes_per_token(shape, setting.dtype)
    kept = tokens * b * shape.hidden * shape.layers if setting.checkpointing else shape.layers * per_block
    elements, scratch = (1 << 28, 2 * 4096 * 8192) if setting.on_cuda else (1 << 25, 0)
    rows = min(tokens, max(elements // shape.vocabulary, shape.hidden // 4))
    phases = [4 * (rows * shape.vocabulary + scratch + shape.vocabulary * shape.hidden)]
    computed_again = per_block if setting.checkpointing else 0
    if n == 1:
        gathered = b * whole * (setting.dtype == "bfloat16")
        phases += [computed_again]
    else:
        gathered = b * root
        phases += [computed_again + (3 * b + 4) * block + b * root, (b + 4) * root]
    parts = {
        "masters, gradients, moments": 16 * whole / n,
        "gathered all the while": gathered,
        "unsharded gradients": 4 * whole * (setting.unsharded and n > 1),
        "activations": kept + tokens * (3 * b + 16) * shape.hidden,
        "a block, or the head": max(phases),
    }
    return parts if setting.unsharded else {name: part for name, part in parts.items() if name != "unsharded gradients"}


def total_gb(shape: Shape, setting: Setting) -> float:
    return sum(rank_bytes(shape, setting).values()) / 1e9


def longest_pass(shape: Shape, ranks: int, device_gb: float) -> int:
    """The most tokens of a pass that fit, in thousands; 0 if none do."""
    low, high = 0, 1 << 24
    while high - low > 1:
        middle = (low + high) // 2
        fits = total_gb(shape, Setting(ranks, middle)) <= USABLE * device_gb
        low, high = (middle, high) if fits else (low, middle)
    return low // 1000


def fits_table() -> str:
    small, large = DEVICES_GB
    lines = [
        "| model | parameters | " + " | ".join(f"{n} device{'s' * (n > 1)}" for n in WITH_A_SECOND_NODE) + " |",
        "|---|---|" + "---|" * len(WITH_A_SECOND_NODE),
    ]
    for shape in SHAPES:
        cells = []
        for n in WITH_A_SECOND_NODE:
            used = total_gb(shape, Setting(n))
            fits_small, fits_large = (used <= USABLE * gb for gb in (small, large))
            cells.append(f"**{used:.0f}**" if fits_small else f"{used:.0f}" if fits_large else f"({used:.0f})")
        lines.append(f"| {shape.name} | {shape.parameters / 1e9:.1f}B | {' | '.join(cells)} |")
    return "\n".join(lines)


def pass_table() -> str:
    columns = [(n, gb) for gb in DEVICES_GB for n in RANKS]
    lines = [
        "| model | " + " | ".join(f"{n} of {gb} GB" for n, gb in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for shape in SHAPES:
        cells = [str(longest_pass(shape, n, gb) or "none") for n, gb in columns]
        lines.append(f"| {shape.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parts_table() -> str:
    """One model, in gigabytes, by what they are for."""
    shape = next(each for each in SHAPES if each.name == "Qwen3-8B")
    found = [rank_bytes(shape, Setting(n)) for n in RANKS]
    lines = [
        f"| {shape.name}, GB a rank | " + " | ".join(f"{n} rank{'s' * (n > 1)}" for n in RANKS) + " |",
        "|---|" + "---|" * len(RANKS),
    ]
    for part in found[0]:
        lines.append(f"| {part} | {' | '.join(f'{each[part] / 1e9:.1f}' for each in found)} |")
    lines.append(f"| together | {' | '.join(f'{sum(each.values()) / 1e9:.1f}' for each in found)} |")
    return "\n".join(lines)


def newest_result() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(max(RESULTS.glob("sizing-*.json")).read_text(encoding="utf-8"))
    return found


def measured_case(case: dict[str, Any]) -> tuple[Shape, Setting]:
    shape = Shape(**case["model"], head_dim=64, tied=True)
    unsharded = case["accumulation"] == "unsharded"
    return shape, Setting(case["ranks"], case["tokens"], case["dtype"], case["checkpointing"], unsharded, on_cuda=False)


def measured_table() -> str:
    names = ("model", "ranks", "dtype", "tokens a pass", "checkpointing", "accumulation", "formula, MB", "measured, MB")
    lines = [f"| {' | '.join(names)} | ratio |", "|---" * (len(names) + 1) + "|"]
    for each in newest_result():
        shape, setting = measured_case(each["case"])
        formula, measured = total_gb(shape, setting) * 1e3, each["peak_bytes"] / 1e6
        checkpointing = "yes" if setting.checkpointing else "no"
        accumulation = each["case"]["accumulation"] if setting.ranks > 1 else ""
        cells = (shape.name, setting.ranks, setting.dtype, f"{setting.tokens:,}", checkpointing, accumulation)
        lines.append(f"| {' | '.join(map(str, cells))} | {formula:,.0f} | {measured:,.0f} | {measured / formula:.2f} |")
    return "\n".join(lines)


TABLES = {"fits": fits_table, "pass": pass_table, "parts": parts_table, "measured": measured_table}


def page(text: str) -> str:
    """The page with its tables made anew: each stands between `<!-- NAME -->` and `<!-- end -->`."""
    for name, table in TABLES.items():
        before, start, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        text = f"{before}{start}{table()}\n{end}{after}"
    return text


def draw(file: Path) -> None:
    """A bar for each model and number of ranks, by what the memory is for."""
    shapes = [each for each in SHAPES if each.name in ("Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B")]
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": "sizing"}):
        canvas = Figure(figsize=(10.5, 3.6), layout="constrained")
        for ax, shape in zip(canvas.subplots(1, len(shapes), sharey=True), shapes, strict=True):
            below = [0.0] * len(RANKS)
            found = [rank_bytes(shape, Setting(n)) for n in RANKS]
            for part, colour in zip(found[0], drawing.SERIES, strict=False):
                heights = [each[part] / 1e9 for each in found]
                ax.bar([str(n) for n in RANKS], heights, bottom=below, color=colour, width=0.62, label=part)
                below = [low + height for low, height in zip(below, heights, strict=True)]
            for gb in DEVICES_GB:
                ax.axhline(USABLE * gb, color=drawing.INK, linestyle="--", linewidth=1.0)
                if shape is shapes[0]:
                    ax.text(3.4, USABLE * gb + 3, f"{gb} GB less 10%", fontsize=8, ha="right")
            ax.set(ylim=(0, 200), title=shape.name, xlabel="devices")
            ax.grid(axis="x", visible=False)
        canvas.axes[0].set_ylabel("GB a device")
        canvas.legend(*canvas.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
        canvas.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator")))


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    draw(PICTURE)
