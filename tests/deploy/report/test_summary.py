import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

import wire_examples
from penstock.deploy.report.lines import TelemetryError
from penstock.deploy.report.summary import summarize
from penstock.deploy.report.summary_table import summary_table, table_rows, warnings_of
from penstock.deploy.report.telemetry import read_telemetry
from penstock.schemas.policy import make_version
from run_lines import ledger_line, update_line, write_lines

START_S = 1000.0
GOAL = 'evaluation.goal = { figure = "reward/exact", value = 0.9 }'
RUN_FILE = f"""
name = "demo"
seed = 3
num_updates = 3
{GOAL}
[model]
path = "models/demo"
[environment]
path = "penstock.producers.environments.arithmetic:Arithmetic"
"""
FINGERPRINT = msgspec.to_builtins(wire_examples.FINGERPRINT)


def evaluation_line(version: int, exact: float, time_s: float, update: int | None = None) -> dict:
    update = version if update is None else update
    line = {"num_prompts": 64, "time_s": time_s}
    return {"policy_version": version, "update": update, "reward": exact / 2, "reward/exact": exact, **line}


def rate(time_s: float, num_tokens: int) -> dict:
    return {"event": "rate", "time_s": time_s, "tokens_per_s": 0.0, "num_tokens": num_tokens}


def weights(time_s: float, pause_s: float) -> dict:
    return {"event": "weights", "time_s": time_s, "policy_version": 1, "pause_s": pause_s, "load_s": 0.01, "bytes": 9}


def started(time_s: float, **fields: object) -> dict:
    return {"event": "start", "time_s": time_s, "fingerprint": FINGERPRINT | fields}


GROUPS = {"released": 20, "trained": 9, "skipped": 3, "dead": 1, "cancelled": 7}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Three updates in 30 s, two producers, numbers that can be added up by hand."""
    folder = tmp_path / "demo"
    folder.mkdir()
    (folder / "run.toml").write_text(RUN_FILE)
    masked = {"num_tokens_masked_lag": 8, "num_tokens_rejected": 5, "masked_frac": 13 / 40}
    last = update_line(3, lag_histogram={"1": 20, "2": 12, "10": 8}, num_tokens_trained=32, **masked)
    write_lines(folder / "updates.jsonl", update_line(1), update_line(2), last)
    evaluations = [evaluation_line(0, 0.4, 1001.0), evaluation_line(1, 0.91, 1014.0), evaluation_line(3, 0.89, 1032.0)]
    write_lines(folder / "evaluations.jsonl", *evaluations)
    # 100 tokens/s from 990 on: 3,000 within the run.
    events = [started(990.0), weights(995.0, 2.0), rate(1000.0, 1000), weights(1010.0, 0.02), weights(1020.0, 0.04)]
    write_lines(folder / "producers" / "producer-0.jsonl", *events, rate(1040.0, 5000))
    # Joins at 1010, does 500 tokens in 10 s, is killed, starts again at 1025 and does 200 in 5 s.
    events = [started(1010.0), rate(1020.0, 500), started(1025.0), rate(1030.0, 200), weights(1030.0, 0.03)]
    write_lines(folder / "producers" / "producer-1.jsonl", *events)
    ledger = {"num_groups_released_again": {"stale": 2}, "num_duplicates_dropped": 1, "first_prompt_s": START_S}
    write_lines(folder / "trainer.json", ledger_line(3, **GROUPS) | ledger)
    return folder


def summary_of(run_folder: Path) -> dict[str, Any]:
    return summarize(read_telemetry(run_folder))


def test_the_summary_holds_what_the_files_add_up_to(run_folder: Path) -> None:
    summary = summary_of(run_folder)
    expected: dict[str, object] = {
        "name": "demo",
        "seed": 3,
        "finished": True,
        "figure": "reward/exact",
        "held_out": {
            "reward": {"initial": 0.2, "final": 0.445, "best": 0.455},
            "reward/exact": {"initial": 0.4, "final": 0.89, "best": 0.91},
        },
        "goal": 0.9,
        "goal_reached_s": 14.0,
        "wall_s": 30.0,
        "num_updates": 3,
        "updates_per_s": 0.1,
        **{f"num_groups_{outcome}": count for outcome, count in GROUPS.items()},
        "num_groups_released_again": {"stale": 2},
        "num_duplicates_dropped": 1,
        "num_tokens_trained": 112,
        "num_tokens_masked_lag": 8,
        "num_tokens_rejected": 5,
        "masked_frac": 13 / 120,
        "mismatch_by_lag": {},
        "lag_histogram": {"0": 20, "1": 80, "2": 12, "10": 8},
        "mean_lag": (80 + 24 + 80) / 120,
        "ess_fraction_min": 0.97,
        "mismatch_lag0": None,
        "trainer_tokens_per_s": 112 / 30,
        "engine": FINGERPRINT,
        "engines_that_differ": [],
        "missing": [],
        "num_torn_lines": 0,
        "num_tokens_sampled": 3700.0,
        # Without those before the first prompt.
        "num_weight_loads": 3,
        "pause_s_p50": 0.03,
        "pause_s_p99": 0.03 + 0.98 * 0.01,
        "pause_s_max": 0.04,
        "paused_share": 0.09 / (30 + 20),
    }
    for name, value in expected.items():
        assert summary[name] == (pytest.approx(value) if isinstance(value, float) else value), name
    assert list(summary["lag_histogram"]) == ["0", "1", "2", "10"]
    assert summary["trainer_time_share"] == pytest.approx({"wait": 0.1, "step": 0.7, "publish": 0.05})
    rates = summary["producer_tokens_per_s"]
    assert rates["by_producer"] == pytest.approx({"producer-0": 100.0, "producer-1": 35.0}), "over its restart"
    assert rates["total"] == pytest.approx((3000 + 700) / 30)


def test_a_goal_is_shown_as_reached_not_reached_or_never(run_folder: Path) -> None:
    write_lines(run_folder / "evaluations.jsonl", evaluation_line(0, 0.4, 1001.0), evaluation_line(3, 0.8, 1031.0))
    for run_file, row in (
        (RUN_FILE, "reward/exact 0.9 not reached"),
        (RUN_FILE.replace("value = 0.9", "value = 0.8"), "reward/exact 0.8 after 31.0 s"),
        (
            RUN_FILE.replace("reward/exact", "reward/exakt"),
            "reward/exakt 0.9 is never reached: evaluations have reward, reward/exact",
        ),
        (RUN_FILE.replace(GOAL, ""), None),
    ):
        (run_folder / "run.toml").write_text(run_file)
        assert dict(table_rows(summary_of(run_folder))).get("goal") == row, run_file


def test_the_course_of_rewards_and_completions_is_in_summary_and_table(run_folder: Path) -> None:
    fields = {"reward_std": 0.5, "completion_tokens": 3.0, "truncated_frac": 0.25, "reward/exact": 0.4}
    last = {"reward": 0.9, "reward_std": 0.1, "completion_tokens": 40.0, "truncated_frac": 0.0, "reward/exact": 0.8}
    write_lines(run_folder / "updates.jsonl", update_line(1, **fields), update_line(2), update_line(3, **last))
    summary = summary_of(run_folder)
    assert summary["course"] == {
        "reward": {"first": 0.5, "last": 0.9},
        "reward_std": {"first": 0.5, "last": 0.1},
        "completion_tokens": {"first": 3.0, "last": 40.0},
        "truncated_frac": {"first": 0.25, "last": 0.0},
        "reward/exact": {"first": 0.4, "last": 0.8},
    }
    rows = dict(table_rows(summary))
    assert rows["reward"] == "0.500 → 0.900  (exact 0.400 → 0.800)"
    assert rows["its spread"].startswith("0.500 → 0.100 ")
    assert rows["completions"] == "3.0 → 40.0 tokens, 25.0% → 0.0% truncated"


def test_each_of_several_environments_has_a_row_of_its_own(run_folder: Path) -> None:
    def own(reward: float) -> dict:
        return {"reward": reward, "reward/exact": 1.0, "num_groups_trained": 2, "num_groups_skipped": 1}

    def biased(reward: float, num_tokens: int, lag: float) -> dict:
        bias = {"lag_mean": lag, "chi2": lag / 10, "ess_fraction": 1 - lag / 10, "masked_frac": lag / 100}
        return own(reward) | {"num_tokens": num_tokens, "num_tokens_sampled": num_tokens} | bias

    lines = [update_line(n, environments={"sums": biased(n / 10, 100 * n, n), "words": own(0.0)}) for n in (1, 2)]
    none_in_batch = {"num_groups_trained": 0, "num_groups_skipped": 5}
    lines += [update_line(3, environments={"sums": own(0.7), "words": none_in_batch})]
    write_lines(run_folder / "updates.jsonl", *lines)
    evaluated = evaluation_line(3, 0.8, 1031.0) | {"environments": {"words": {"reward": 0.25}}}
    write_lines(run_folder / "evaluations.jsonl", evaluated)
    summary = summary_of(run_folder)
    assert summary["environments"]["sums"]["num_groups_trained"] == 6
    rows = dict(table_rows(summary))
    assert rows["  sums"].startswith("0.100 → 0.700  (exact 1.000 → 1.000); held-out n/a; 6 groups trained, 3 skipped")
    # Means over 100 tokens of lag 1 and 200 of lag 2.
    assert rows["  sums"].endswith("; lag 1.67, ESS 0.833, χ² 0.17, 1.7% masked")
    assert rows["  words"].startswith("0.000 → 0.000") and rows["  words"].endswith(
        "held-out 0.250 → 0.250; 4 groups trained, 7 skipped; lag n/a, ESS n/a, χ² n/a, n/a masked"
    )


def test_after_a_resume_the_later_line_of_a_batch_counts(run_folder: Path) -> None:
    failed = update_line(2, skipped_reason="non-finite loss", num_tokens_trained=0, lag_histogram={})
    lines = [update_line(1), update_line(2), failed, update_line(3), update_line(4)]  # it made no update
    # The checkpoint was at update 2; the lost trainer had come to 4, the resumed one to 3.
    lines += [update_line(3, num_tokens_trained=25, lag_histogram={"0": 25})]
    lines[-1]["policy_version"] = make_version(1, 1)
    write_lines(run_folder / "updates.jsonl", *lines)
    points = [evaluation_line(0, 0.4, 1001.0), evaluation_line(2, 0.5, 1022.0), evaluation_line(4, 0.99, 1041.0)]
    points += [evaluation_line(make_version(1, 0), 0.52, 1050.0, update=2)]
    points += [evaluation_line(make_version(1, 1), 0.6, 1060.0, update=3)]
    write_lines(run_folder / "evaluations.jsonl", *points)
    summary = summary_of(run_folder)
    assert summary["num_updates"] == 3
    assert summary["num_tokens_trained"] == 40 + 40 + 25
    assert summary["lag_histogram"] == {"0": 45, "1": 60}
    assert summary["goal_reached_s"] is None
    points = read_telemetry(run_folder).evaluations
    assert [(point.update, point.metrics["reward/exact"]) for point in points] == [(0, 0.4), (2, 0.52), (3, 0.6)]


def test_the_policy_that_a_warm_start_made_is_where_a_run_begins(run_folder: Path) -> None:
    write_lines(run_folder / "updates.jsonl", *(update_line(n, policy_version=200 + n) for n in (1, 2)))
    points = [evaluation_line(200, 0.3, 1001.0, update=0), evaluation_line(202, 0.7, 1030.0, update=2)]
    write_lines(run_folder / "evaluations.jsonl", *points)
    found = summary_of(run_folder)["held_out"]["reward/exact"]
    assert (found["initial"], found["final"]) == (0.3, 0.7)


def test_a_missing_file_is_named_and_its_figures_are_null(run_folder: Path) -> None:
    for name, figure in (
        ("producers/*.jsonl", "producer_tokens_per_s"),
        ("run.toml", "seed"),
        ("evaluations.jsonl", "held_out"),
        ("trainer.json", "num_groups_released"),
        ("updates.jsonl", "lag_histogram"),
    ):
        for file in run_folder.glob(name):
            file.unlink()
        summary = summary_of(run_folder)
        assert name in summary["missing"] and summary[figure] is None, name
    assert len(summary["missing"]) == 5 and "missing" in table(summary)


def test_lines_cut_short_are_counted_and_what_is_malformed_is_an_error_that_names_file_and_line(
    run_folder: Path,
) -> None:
    file = run_folder / "updates.jsonl"
    first, *rest = file.read_text().splitlines()
    torn = '{"update": 4, "policy_version": 4, "lag_histogram": {"0": 3}'  # by a kill before a resume, and just now
    file.write_text("\n".join([first, rest[0][:40], *rest, torn]))
    summary = summary_of(run_folder)
    assert summary["num_torn_lines"] == 2 and summary["num_updates"] == 3
    for name, text, message in (
        ("updates.jsonl", f"{first}\nhello", "line 2: .*Expecting value"),
        ("updates.jsonl", f'{first}\n{{"update": 2}} {{}}', "line 2: .*Extra data"),
        ("updates.jsonl", f'{first}\n{{"update": "two"}}', r"line 2: .*Expected `int`, got `str` - at `\$.update`"),
        ("updates.jsonl", f"{first}\n[1, 2]", "line 2: .*Expected `object`, got `array`"),
        ("trainer.json", '{"num_updates": 3}', ".*num_groups_released"),
        ("producers/producer-0.jsonl", '{"event": "surprise"}', "line 1: .*surprise"),
    ):
        whole = (run_folder / name).read_text()
        (run_folder / name).write_text(f"{text}\n")
        with pytest.raises(TelemetryError, match=rf"{Path(name).name}: {message}"):
            summary_of(run_folder)
        (run_folder / name).write_text(whole)
    with pytest.raises(TelemetryError, match="nowhere: no such run folder"):
        summary_of(run_folder / "nowhere")


def test_what_is_not_finite_counts_for_nothing_and_another_engine_is_named(run_folder: Path) -> None:
    lines = [update_line(1, ess_fraction=float("nan"), mismatch_lag0=2e-6), update_line(2, mismatch_lag0=4e-6)]
    write_lines(run_folder / "updates.jsonl", *lines, update_line(3, loss=float("inf")))
    write_lines(run_folder / "producers" / "producer-2.jsonl", started(1001.0, dtype="bfloat16"))
    summary = summary_of(run_folder)
    assert (summary["ess_fraction_min"], summary["mismatch_lag0"]) == (pytest.approx(0.97), pytest.approx(3e-6))
    assert (summary["engine"], summary["engines_that_differ"]) == (FINGERPRINT, ["producer-2"])
    assert summary["producer_tokens_per_s"]["by_producer"]["producer-2"] is None


def test_mismatch_by_lag_is_the_mean_over_the_tokens_of_all_updates(run_folder: Path) -> None:
    first = {"num_tokens/lag_0": 10, "k3_kl/lag_0": 1e-3, "kl/lag_0": 0.0, "num_tokens/lag_2-3": 4, "chi2/lag_2-3": 0.5}
    second = {"num_tokens/lag_0": 30, "k3_kl/lag_0": 5e-3, "kl/lag_0": None, "weight_mean/lag_0": 0.75}
    write_lines(run_folder / "updates.jsonl", update_line(1, **first), update_line(2, **second), update_line(3))
    summary = summary_of(run_folder)
    assert list(summary["mismatch_by_lag"]) == ["0", "2-3"]
    fresh, older = summary["mismatch_by_lag"].values()
    assert fresh == pytest.approx({"num_tokens": 40, "kl": 0.0, "k3_kl": 4e-3, "weight_mean": 0.75})
    assert older == {"num_tokens": 4, "chi2": 0.5}
    assert "0: 0.004" in table(summary) and "2-3: 0.5" in table(summary)


def table(summary: dict) -> str:
    output = io.StringIO()
    Console(file=output, width=80).print(summary_table(summary))
    return output.getvalue()


def test_the_table_fits_80_columns_and_shows_the_result(run_folder: Path) -> None:
    text = table(summary_of(run_folder))
    assert max(len(line) for line in text.splitlines()) <= 80
    for part in ("0.400 → 0.890", "0.9 after 14.0 s", "20 released", "0: 16.7%", "producer-1 35", "vllm 0.32.0"):
        assert part in text
    assert "2: 10.0%, 10: 6.7% (masked)" in text, "the bound is 2"


def test_what_must_not_be_overlooked_ends_the_run_as_a_warning() -> None:
    names = ("num_groups_trained", "num_groups_skipped", "num_groups_dead", "num_evaluation_failed")
    others = {"name": "r", "num_evaluation_prompts": 2, "attrition": None, "lag_histogram": {"0": 100}}
    for counts, num_masked, wanted in (
        ((9, 1, 0, 0), 11, "11% of the sampled tokens were masked for their lag, older than twice max_lag"),
        ((9, 1, 0, 0), 10, ""),
        ((1274, 11526, 0, 0), 0, "11,526 of 12,800 groups trained nothing: the rewards within each group"),
        ((5, 5, 0, 0), 0, ""),
        (
            (None, 1, None, None),
            0,
            "1 of 1 groups trained nothing: the rewards within each group are equal (`penstock try RUN.toml` shows "
            "prompts, completions and rewards; `warm_start` is for a model that is never right)",
        ),
        ((8, 4, 6, 0), 0, "6 of 18 groups died: `penstock dead list r` says of what"),
        ((8, 4, 0, 2), 0, "2 of 2 held-out prompts failed in the last evaluation, each counts as 0"),
    ):
        summary = others | {"num_tokens_masked_lag": num_masked} | dict(zip(names, counts, strict=True))
        warned = warnings_of(summary)
        assert len(warned) == bool(wanted) and all(line.startswith(wanted) for line in warned), counts


def rounded(figure: Any) -> Any:
    return json.loads(json.dumps(figure), parse_float=lambda text: float(f"{float(text):.6g}"))


@pytest.mark.parametrize("step_s", [-172_800.0, 172_800.0])
def test_a_clock_that_is_set_changes_no_duration(run_folder: Path, step_s: float) -> None:
    """The clock is set within the second update. trainer and producers run since 980."""
    before = summary_of(run_folder)
    for file in (run_folder / "updates.jsonl", run_folder / "evaluations.jsonl", *run_folder.glob("producers/*.jsonl")):
        lines = [json.loads(text) for text in file.read_text().splitlines()]
        process_s = 980.0
        for line in lines:
            if line.get("event") == "start":
                process_s = line["time_s"]
            line |= {"started_s": process_s, "uptime_s": line["time_s"] - process_s}
            line["time_s"] += step_s if line["time_s"] > 1012 else 0.0
        write_lines(file, *lines)
    after = summary_of(run_folder)
    changed = {name for name in before if rounded(after[name]) != rounded(before[name])}
    assert changed == {"last_update_s"} and after["wall_s"] == 30.0
