"""A report as text, as pictures and as what the gate left: drawn from reports made by hand."""

import io
import math
import os
import xml.etree.ElementTree as ElementTree

import msgspec
import pytest
from rich.console import Console

from penstock.consumers.parity.report import GapPoint, Hypothesis, LagRow, LayerGap, ParityReport, Verdict
from penstock.consumers.parity.tolerance import TOLERANCES, Gap
from penstock.deploy.parity.command import GateRefusedError, gate_refusal, raise_gate_refusal
from penstock.deploy.parity.display import draw, print_report, write_pictures
from penstock.schemas.policy import make_version

NAN = math.nan


def gap(mean: float, num_tokens: int = 1000) -> Gap:
    return Gap(num_tokens=num_tokens, mean=mean, p99=3 * mean, max=9 * mean, chi2=0.0, ess_fraction=1.0)


def hypothesis(name: str, says: str, mean: float, **more) -> Hypothesis:
    return Hypothesis(layer=more.pop("layer", "semantics"), name=name, says=says, gap=gap(mean), **more)


def lag_row(label: str, mean: float) -> LagRow:
    return LagRow(
        label=label,
        num_tokens=500,
        mean=mean,
        p99=3 * mean,
        kl=mean / 2,
        k3_kl=mean / 3,
        chi2=mean / 4,
        ess_fraction=0.987,
        ratio_deviation=1e4 * mean,
    )


RAW = Verdict(
    status="mismatch",
    cause="raw",
    sentence="these are raw logprobs: residual 3.1e-01 as processed, 4.2e-06 as raw",
    advice='set engine.logprobs_mode = "processed_logprobs"',
)
REPORT = ParityReport(
    verdict=RAW,
    dtype="float32",
    tolerance=TOLERANCES["float32"],
    num_groups=16,
    num_rollouts=128,
    num_tokens=1000,
    versions=(3, 4),
    hypotheses=(
        hypothesis("processed", "as the trainer computes it", 0.31),
        hypothesis("raw", "raw", 4.2e-6),
        hypothesis("weights-1", "weights of the version before", 0.5, layer="inference", note="2 rows of 8"),
        Hypothesis(
            layer="inference",
            name="retokenized",
            says="re-tokenized",
            gap=Gap(num_tokens=0, mean=NAN, p99=NAN, max=NAN, chi2=NAN, ess_fraction=NAN),
        ),
    ),
    lags=(lag_row("0", 0.31), lag_row("1", 0.32), lag_row("8+", 0.4)),
    layers=(
        LayerGap(name="layers.0.attention", error=2e-7, allowed=1e-5),
        LayerGap(name="layers.1.mlp", error=3e-2, allowed=1e-5),
        LayerGap(name="head", error=NAN, allowed=1e-5),
    ),
    points=tuple(GapPoint(-0.1 * n, -0.1 * n - 0.01 * (n % 3), n % 40, n % 12 - 1) for n in range(200)),
    notes=("engine.prefix_caching is [on] \\[x]",),
    seconds=2.34,
)


def shown(report: ParityReport) -> str:
    console = Console(file=io.StringIO(), width=160, highlight=False)
    print_report(report, "run r", console)
    return console.file.getvalue()


def test_a_report_as_text_ends_with_the_verdict_and_what_to_do():
    text = shown(REPORT)
    for part in (*(each.says for each in REPORT.hypotheses), "3.1e-01", "4.2e-06", "within tolerance", "2 rows of 8"):
        assert part in text
    assert "policies 3, 4" in text and "note: engine.prefix_caching is [on] \\[x]" in text
    assert text.index("note:") < text.index("MISMATCH  these are raw logprobs")
    assert text.rstrip().endswith(RAW.advice)
    assert text.count("OFF") == 2 and "layers.1.mlp" in text and "head" in text, "a layer without a number is off"
    assert "layers.0.attention" not in text and "... 1 more" in text

    verdict = msgspec.structs.replace(RAW, sentence=f"{RAW.sentence}; {RAW.advice}")
    resumed = (7, *(make_version(2, n) for n in range(9)))
    text = shown(msgspec.structs.replace(REPORT, verdict=verdict, versions=resumed))
    assert text.count(RAW.advice) == 1
    assert "policies 0:7, 2:0, 2:1, 2:2, 2:3, ..., 2:8" in text


def test_pictures_show_each_token_and_each_lag_under_the_verdict(tmp_path):
    svg, png = write_pictures(REPORT, tmp_path / "out")
    root = ElementTree.parse(svg).getroot()
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any("these are raw logprobs" in text for text in texts)
    assert not any("$" in text for text in texts), "no formula is left undrawn"
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 20_000

    against, by_position, by_lag = draw(REPORT).axes
    assert len(against.collections[0].get_offsets()) == len(REPORT.points)
    assert len(by_position.collections[0].get_offsets()) == len(REPORT.points)
    assert [bar.get_height() for bar in by_lag.patches] == [0.31, 0.32, 0.4]
    points = (GapPoint(-1.0, -1.0, 0, 0), GapPoint(-2.0, NAN, 3, 0), GapPoint(-0.5, -0.5, 1, -1))
    against, *_ = draw(msgspec.structs.replace(REPORT, points=points)).axes
    assert len(against.collections[0].get_offsets()) == 2
    for ax in draw(msgspec.structs.replace(REPORT, points=(), lags=())).axes:
        assert [text.get_text() for text in ax.texts] == ["nothing to draw"]


def test_a_refusal_of_the_gate_is_found_in_the_run_s_folder_and_shown(tmp_path, capsys):
    assert gate_refusal(tmp_path, 0.0) is None
    file = tmp_path / "parity.json"
    wordless = msgspec.structs.replace(
        RAW, status="unclear", cause="not comparable", sentence="could not tell: every behavior_logprob is 0"
    )
    for verdict, opening in (
        (RAW, "MISMATCH  these are raw logprobs"),
        (wordless, "COULD NOT TELL  every behavior"),
    ):
        file.write_bytes(msgspec.json.encode(msgspec.structs.replace(REPORT, gate="refuse", verdict=verdict)))
        with pytest.raises(GateRefusedError, match="the parity gate refuses to train") as refused:
            raise_gate_refusal(tmp_path, since_s=0.0)
        out, err = capsys.readouterr()
        assert opening in out and str(file) in out
        assert f"penstock parity {tmp_path / 'run.toml'}" in str(refused.value) and err == ""
    os.utime(file, (1000.0, 1000.0))
    assert gate_refusal(tmp_path, 999.0) == wordless and gate_refusal(tmp_path, 1001.0) is None, "of an earlier start"
    trained = (("parity", "parity"), ("unclear", "undecided"))
    for changes in (
        {"gate": "warn"},
        {"gate": ""},
        *({"gate": "refuse", "verdict": Verdict(status=s, cause=cause, sentence="x")} for s, cause in trained),
    ):
        file.write_bytes(msgspec.json.encode(msgspec.structs.replace(REPORT, **changes)))
        raise_gate_refusal(tmp_path, since_s=0.0)
    file.write_text("{")
    raise_gate_refusal(tmp_path, since_s=0.0)
    assert capsys.readouterr() == ("", "")
