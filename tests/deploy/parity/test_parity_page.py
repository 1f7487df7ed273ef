"""The page on the parity check says what the check does: its commands parse, causes and tolerances are real."""

import re
import shlex
from pathlib import Path

import pytest

from penstock.consumers.parity.layer_verdict import with_layers
from penstock.consumers.parity.report import CAUSES, Hypothesis, LayerGap, ParityReport
from penstock.consumers.parity.tolerance import TOLERANCES, Gap
from penstock.consumers.parity.verdict import ParityMeasurements, decide
from penstock.deploy import cli

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "parity.md"
TEXT = PAGE.read_text(encoding="utf-8")


def commands() -> list[str]:
    lines = re.findall(r"^\$ (penstock .*)$", TEXT, re.M)
    return [line.removesuffix(" ...") for line in lines]


@pytest.mark.parametrize("command", commands())
def test_each_command_on_the_page_is_one(command):
    name, *arguments = shlex.split(command)[1:]
    taken, *_ = cli.app.parse_args([name, *arguments], exit_on_error=False, print_error=False)
    assert taken is cli.app[name].default_command


def test_the_page_names_every_cause_and_no_other():
    rows = re.findall(r"^\| (`.*?) \|", TEXT.partition("## What it can name")[2].partition("| `model.dtype`")[0], re.M)
    named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    known = {"weights-1" if name == "weights" else name for name in CAUSES}
    assert named == known | {"weights+1", "layer"}
    flat = " ".join(TEXT.split())
    for cause in ("raw", "temperature", "rounded", "siblings", "retokenized", "sampling", "weights", "stale-prefix"):
        assert CAUSES[cause].opening in flat, cause


def test_what_a_wrong_layer_leads_to_is_shown_as_the_verdict_says_it():
    gap = Gap(num_tokens=99, mean=1.1e-2, p99=1.0, max=1.0, chi2=0.0, ess_fraction=1.0)
    trainer_head = Gap(num_tokens=99, mean=0.0, p99=0.0, max=0.0, chi2=0.0, ess_fraction=1.0)
    report = ParityReport(
        verdict=decide(ParityMeasurements("float32", gap, gap, 64, TOLERANCES["float32"], trainer_head=trainer_head)),
        dtype="float32",
        tolerance=TOLERANCES["float32"],
        num_groups=1,
        num_rollouts=1,
        num_tokens=99,
        versions=(0,),
        hypotheses=(Hypothesis(layer="semantics", name="processed", says="", gap=gap),),
    )
    shown = with_layers(report, (LayerGap(name="layers.0.attention", error=0.33, allowed=1e-5),)).verdict
    assert f"MISMATCH  {shown.sentence}\n{shown.advice}\n" in TEXT


def test_the_tolerances_on_the_page_are_the_real_ones():
    for dtype, tolerance in TOLERANCES.items():
        (row,) = re.findall(rf"^\| `{dtype}` \|(.*)\|$", TEXT, re.M)
        cells = [float(cell) if cell.strip() else None for cell in row.split("|")]
        assert cells == [tolerance.mean, tolerance.p99, tolerance.max, tolerance.chi2]
