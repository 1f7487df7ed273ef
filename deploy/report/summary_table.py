"""The figures of a summary for a reader: the table that ends `penstock run`, and its warnings."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from rich import box
from rich.table import Table

from penstock.deploy.report.means import MASKED
from penstock.schemas import limits
from penstock.schemas.attrition import LostByLength
from penstock.schemas.metrics import REWARD, figure_name, figures_of

NOTHING = "n/a"
NOTHING_LEARNED = (
    "the rewards within each group are equal (`penstock try RUN.toml` shows prompts, completions and rewards; "
    "`warm_start` is for a model that is never right)"
)


def masked_advice(share: float) -> str:
    """Says what helps where many tokens are masked for their lag. share: of the sampled tokens."""
    return (
        f"{share:.0%} of the sampled tokens were masked for their lag, older than twice max_lag: after a resume this "
        "ends by itself; otherwise raise max_lag"
    )


def warnings_of(summary: dict[str, Any]) -> list[str]:
    """Returns what a reader must not overlook: most groups skipped, dead groups, many tokens masked, lost long groups,
    failed held-out prompts."""
    trained, skipped, dead = (summary[f"num_groups_{what}"] or 0 for what in ("trained", "skipped", "dead"))
    failed, asked = summary["num_evaluation_failed"], summary["num_evaluation_prompts"]
    found = []
    if skipped > trained:
        found.append(f"{skipped:,} of {trained + skipped:,} groups trained nothing: {NOTHING_LEARNED}")
    if dead:
        total = trained + skipped + dead
        found.append(f"{dead:,} of {total:,} groups died: `penstock dead list {summary['name']}` says of what")
    total = sum((summary["lag_histogram"] or {}).values())
    if total and (share := summary["num_tokens_masked_lag"] / total) > limits.BEYOND_BOUND:
        found.append(masked_advice(share))
    test = (summary["attrition"] or {}).get("lost_by_length")
    if test is not None and (test := msgspec.convert(test, LostByLength)).is_alarm:
        found.append(f"long rollouts are lost at a rate that short ones are not: {test}")
    if failed:
        found.append(f"{failed} of {asked} held-out prompts failed in the last evaluation, each counts as 0: see logs")
    return found


def summary_table(summary: dict[str, Any]) -> Table:
    """Returns the figures of a summary as one table."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False, title_justify="left")
    table.title = f"Run {summary['name']}".replace("[", r"\[")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in table_rows(summary):
        table.add_row(label, value.replace("[", r"\["))
    return table


def table_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns (label, value) pairs for a reader; `n/a` for a missing figure."""
    s = summary
    groups = [f"{shown(s[f'num_groups_{what}'])} {what}" for what in ("trained", "skipped", "dead", "cancelled")]
    rates = s["producer_tokens_per_s"] or {"total": None, "by_producer": {}}
    by_producer = ", ".join(f"{name} {shown(rate)}" for name, rate in rates["by_producer"].items())
    share = s["trainer_time_share"] or {}
    time_shares = ", ".join(f"{phase} {value:.0%}" for phase, value in share.items())
    group_times = ", ".join(f"{phase} {seconds:.3g} s" for phase, seconds in (s["group_s"] or {}).items())
    engine = s["engine"] or {}
    rows = [
        *([("state", not_over(s))] if not s["finished"] else []),
        (
            "held-out reward",
            _rewards(s["held_out"], "initial", "final")
            + (f"; {s['answered']}, {shown(s['num_evaluation_prompts'])} problems" if s["held_out"] else ""),
        ),
        *([("goal", _goal(s))] if s["goal"] is not None else []),
        *([("ended early", s["ended_early"])] if s["ended_early"] else []),
        *([("warm start", _warm_start(s["warm_start"]))] if s["warm_start"] else []),
        ("reward", _rewards(s["course"], "first", "last")),
        *(
            (
                f"  {name}",
                f"{_rewards(own['course'], 'first', 'last')}; "
                f"held-out {_rewards(own['held_out'], 'initial', 'final')}; "
                f"{own['num_groups_trained']:,} groups trained, {own['num_groups_skipped']:,} skipped; "
                f"lag {shown(own['bias']['lag_mean'], '.2f')}, ESS {shown(own['bias']['ess_fraction'], '.3f')}, "
                f"χ² {shown(own['bias']['chi2'], '.2g')}, {shown(own['bias'][MASKED], '.1%')} masked",
            )
            for name, own in s["environments"].items()
            if len(s["environments"]) > 1
        ),
        ("its spread", f"{_change(s, 'reward_std', '.3f')} standard deviation within a group"),
        (
            "completions",
            f"{_change(s, 'completion_tokens', ',.1f')} tokens, {_change(s, 'truncated_frac', '.1%')} truncated",
        ),
        (
            "updates",
            f"{shown(s['num_updates'])} in {shown(s['wall_s'], ',.1f', ' s')}, {shown(s['updates_per_s'], '.3f')}/s",
        ),
        ("groups", f"{shown(s['num_groups_released'])} released: " + ", ".join(groups)),
        *([("rollouts", _rollouts(s["attrition"]["outcomes"]))] if s["attrition"] else []),
        ("tokens trained", f"{shown(s['num_tokens_trained'])}, {shown(s['trainer_tokens_per_s'])}/s"),
        ("tokens by lag", f"{lag_shares(s['lag_histogram'], s['oldest_lag'])}; mean {shown(s['mean_lag'], '.2f')}"),
        (
            "tokens masked",
            f"{shown(s[MASKED], '.1%')}: {shown(s['num_tokens_masked_lag'])} for their lag, "
            f"{shown(s['num_tokens_rejected'])} rejected by the importance correction",
        ),
        ("k3 KL by lag", _by_lag(s["mismatch_by_lag"], "k3_kl")),
        ("χ² by lag", _by_lag(s["mismatch_by_lag"], "chi2")),
        ("tokens sampled", f"{shown(rates['total'])}/s" + (f"  ({by_producer})" if by_producer else "")),
        ("trainer's time", time_shares or NOTHING),
        *([("a group's time", group_times)] if group_times else []),
        (
            "pauses",
            f"{shown(s['pause_s_p50'], '.1f', ' ms', scale=1000)} p50, "
            f"{shown(s['pause_s_p99'], '.1f', ' ms', scale=1000)} p99, "
            f"{shown(s['num_weight_loads'])} weight loads, {shown(s['paused_share'], '.1%')} of the time",
        ),
        ("engine", f"{engine.get('engine', NOTHING)} {engine.get('version', '')}".strip()),
        ("seed", str(s["seed"]) if s["seed"] is not None else NOTHING),
    ]
    if s["missing"]:
        rows.append(("missing", ", ".join(s["missing"])))
    return rows


def _rollouts(outcomes: dict[str, dict[str, Any]]) -> str:
    """`800 sampled: 61.2% trained, 38.8% skipped; 7.9 tokens on average, 8.1 of those trained`."""
    total = outcomes["sampled"]["num_rollouts"]
    parts = [f"{of['num_rollouts'] / total:.1%} {name}" for name, of in outcomes.items() if name != "sampled"]
    lengths = [outcomes.get(name, {}).get("completion_tokens") for name in ("sampled", "trained")]
    sampled, trained = (shown(length, ",.1f") for length in lengths)
    return f"{total:,} sampled: {', '.join(parts)}; {sampled} tokens on average, {trained} of those trained"


def _warm_start(found: dict[str, float]) -> str:
    """`200 steps, loss 1.532 → 0.211 nats a token; 31,000 tokens in 120.0 s`."""
    return (
        f"{found['num_steps']:,} steps, loss {found['first']:.3f} → {found['last']:.3f} nats a token; "
        f"{found['num_tokens']:,} tokens in {found['seconds']:,.1f} s"
    )


def _rewards(found: dict[str, dict[str, float]] | None, begin: str, end: str) -> str:
    """`0.372 → 0.981 ± 0.009 (exact 0.372 → 0.981)`."""
    if not found or REWARD not in found:
        return NOTHING
    errors = {name: of.get(f"{end}_se") for name, of in found.items()}
    changes = {
        name: f"{of[begin]:.3f} → {of[end]:.3f}" + (f" ± {errors[name]:.3f}" if errors[name] is not None else "")
        for name, of in found.items()
    }
    parts = ", ".join(f"{figure_name(name)} {change}" for name, change in figures_of(changes).items() if name != REWARD)
    return changes[REWARD] + (f"  ({parts})" if parts else "")


def _goal(summary: dict[str, Any]) -> str:
    s, figure = summary, summary["figure"]
    goal = f"{figure} {s['goal']:g} "
    if s["goal_reached_s"] is not None:
        return f"{goal}after {s['goal_reached_s']:,.1f} s"
    if s["held_out"] and figure not in s["held_out"]:
        return f"{goal}is never reached: evaluations have {', '.join(s['held_out'])}"
    return f"{goal}not reached"


def _change(summary: dict[str, Any], name: str, spec: str) -> str:
    """`0.31 → 0.05`, of one number of `course`."""
    found = (summary["course"] or {}).get(name)
    return f"{found['first']:{spec}} → {found['last']:{spec}}" if found else NOTHING


def not_over(summary: dict[str, Any]) -> str:
    """`not over, as of 2026-11-21 20:34:16 UTC; the last update was 3 s before`; for a summary that is not finished."""
    last_s, as_of_s = summary["last_update_s"], summary["as_of_s"]
    update = f"the last update was {as_of_s - last_s:,.0f} s before" if last_s is not None else "no update yet"
    return f"not over, as of {datetime.fromtimestamp(as_of_s, UTC):%Y-%m-%d %H:%M:%S} UTC; {update}"


def lag_shares(histogram: dict[str, int] | None, bound: int | None) -> str:
    """`0: 12%, 1: 63%, 2: 24%, 3: 1% (masked)`, with a bound of 2."""
    total = sum((histogram or {}).values())
    if not histogram or not total:
        return NOTHING
    beyond = {lag for lag in histogram if bound is not None and int(lag) > bound}
    return ", ".join(
        f"{lag}: {count / total:.1%}" + (" (masked)" if lag in beyond else "") for lag, count in histogram.items()
    )


def _by_lag(found: dict[str, dict[str, float]] | None, name: str) -> str:
    """`0: 1.2e-09, 1: 0.00031, 2-3: 0.0011`."""
    values = {label: bucket[name] for label, bucket in (found or {}).items() if name in bucket}
    return ", ".join(f"{label}: {value:.2g}" for label, value in values.items()) or NOTHING


def shown(value: float | None, spec: str = ",.0f", unit: str = "", *, scale: float = 1.0) -> str:
    """Formats a figure for a reader; `n/a` if it is None."""
    return NOTHING if value is None else f"{value * scale:{spec}}{unit}"
