"""Writes the tables of docs/sizing.md, the trainer's memory by arithmetic: `python docs/sizing.py`.

What was measured comes from the newest result of `python -m bench.sizing`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.deploy.launch.memory import USABLE, ModelShape, RankSetting, rank_bytes, total_gb

PAGE = Path(__file__).with_name("sizing.md")
RESULTS = Path(__file__).parents[1] / "bench" / "results"
DEVICES_GB = (80, 141)
RANKS = (1, 2, 4, 8)
WITH_A_SECOND_NODE = (*RANKS, 16)


# As published at huggingface.co: Qwen/Qwen3-*, meta-llama/Llama-3.1-70B.
SHAPES = (
    ModelShape("Qwen3-0.6B", 1024, 3072, 28, 16, 8, 128, 151936, tied=True),
    ModelShape("Qwen3-1.7B", 2048, 6144, 28, 16, 8, 128, 151936, tied=True),
    ModelShape("Qwen3-4B", 2560, 9728, 36, 32, 8, 128, 151936, tied=True),
    ModelShape("Qwen3-8B", 4096, 12288, 36, 32, 8, 128, 151936, tied=False),
    ModelShape("Qwen3-14B", 5120, 17408, 40, 40, 8, 128, 151936, tied=False),
    ModelShape("Qwen3-32B", 5120, 25600, 64, 64, 8, 128, 151936, tied=False),
    ModelShape("Qwen3-30B-A3B", 2048, 768, 48, 32, 4, 128, 151936, tied=False, experts=128, experts_per_token=8),
    ModelShape("Llama-3.1-70B", 8192, 28672, 80, 64, 8, 128, 128256, tied=False, has_head_norms=False),
)


def longest_pass(shape: ModelShape, ranks: int, device_gb: float) -> int:
    """Returns the most tokens of a pass that fit, in thousands; 0 if none do."""
    low, high = 0, 1 << 24
    while high - low > 1:
        middle = (low + high) // 2
        fits = total_gb(shape, RankSetting(ranks, middle)) <= USABLE * device_gb
        low, high = (middle, high) if fits else (low, middle)
    return low // 1000


def table(*rows: Sequence[object]) -> str:
    """Formats a markdown table; the first row is its head."""
    head, *body = (f"| {' | '.join(map(str, row))} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def numbered(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count > 1)}"


def fits_table() -> str:
    small, large = DEVICES_GB

    def cell(shape: ModelShape, ranks: int) -> str:
        used = total_gb(shape, RankSetting(ranks))
        fits_small, fits_large = (used <= USABLE * gb for gb in (small, large))
        return f"**{used:.0f}**" if fits_small else f"{used:.0f}" if fits_large else f"({used:.0f})"

    return table(
        ["model", "parameters", *(numbered(n, "device") for n in WITH_A_SECOND_NODE)],
        *(
            [shape.name, f"{shape.parameters / 1e9:.1f}B", *(cell(shape, n) for n in WITH_A_SECOND_NODE)]
            for shape in SHAPES
        ),
    )


def pass_table() -> str:
    columns = [(n, gb) for gb in DEVICES_GB for n in RANKS]
    return table(
        ["model", *(f"{n} of {gb} GB" for n, gb in columns)],
        *([shape.name, *(longest_pass(shape, n, gb) or "none" for n, gb in columns)] for shape in SHAPES),
    )


def parts_table() -> str:
    """Formats one model's gigabytes by what they are for."""
    shape = next(each for each in SHAPES if each.name == "Qwen3-8B")
    found = [rank_bytes(shape, RankSetting(n)) for n in RANKS]
    return table(
        [f"{shape.name}, GB a rank", *(numbered(n, "rank") for n in RANKS)],
        *([part, *(f"{each[part] / 1e9:.1f}" for each in found)] for part in found[0]),
        ["together", *(f"{sum(each.values()) / 1e9:.1f}" for each in found)],
    )


def newest_result() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(max(RESULTS.glob("sizing-*.json")).read_text(encoding="utf-8"))
    return found


def measured_case(case: dict[str, Any]) -> tuple[ModelShape, RankSetting]:
    shape = ModelShape(*case["model"])
    unsharded = case["accumulation"] == "unsharded"
    sizes = case["ranks"], case["tokens"], case["dtype"], case["checkpointing"]
    return shape, RankSetting(*sizes, unsharded, on_cuda=False, by_expert=case.get("by_expert", False))


def measured_table() -> str:
    inputs, results = ("tokens a pass", "checkpointing", "accumulation"), ("formula, MB", "measured, MB", "ratio")
    rows: list[Sequence[object]] = [("model", "ranks", "dtype", *inputs, *results)]
    for each in newest_result():
        shape, setting = measured_case(each["case"])
        formula, measured = total_gb(shape, setting) * 1e3, each["peak_bytes"] / 1e6
        checkpointing = "yes" if setting.checkpointing else "no"
        accumulation = each["case"]["accumulation"] if setting.ranks > 1 else ""
        accumulation += ", by expert" * setting.by_expert
        cells = (shape.name, setting.ranks, setting.dtype, f"{setting.tokens:,}", checkpointing, accumulation)
        rows.append((*cells, f"{formula:,.0f}", f"{measured:,.0f}", f"{measured / formula:.2f}"))
    return table(*rows)


TABLES = {"fits": fits_table, "pass": pass_table, "parts": parts_table, "measured": measured_table}


def page(text: str) -> str:
    """Replaces the page's tables: each stands between `<!-- NAME -->` and `<!-- end -->`."""
    for name, table in TABLES.items():
        before, start, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        text = f"{before}{start}{table()}\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
