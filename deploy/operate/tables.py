"""Prints the results of the operator's commands on standard output.

Reasons, prompts and names come from producers: control characters in them are shown escaped.
"""

import time
from collections.abc import Iterable, Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from penstock.deploy.launch.command_line import print_table
from penstock.deploy.operate.audit import Audit
from penstock.deploy.operate.dead_letters import Content, Letter, RequeueResult
from penstock.deploy.operate.ledger_check import LedgerCheck, name_indexes
from penstock.deploy.operate.producer_list import Alive, Orphaned, Producers
from penstock.deploy.operate.run_list import ListedRun
from penstock.deploy.operate.weight_list import LogContent, LoggedPolicy, PolicyHolders, StoreContent
from penstock.deploy.report.attrition import attrition_lines, attrition_tables

_POLICIES_SHOWN = 20
"""In addition to the anchors, which are all shown."""
_NAMES_SHOWN = 4
_HANDED_BACK_S = 1e5
"""A claim idle for longer is one that its producer has marked free."""


def print_audit(audit: Audit) -> None:
    """Prints the ledger, other counts, and whether it balances."""
    ledger = audit.ledger
    saved = f"checkpoint {audit.checkpoint}" if audit.checkpoint else "no checkpoint yet"
    state = "finished" if audit.finished else "not finished"
    print(f"Run {audit.run}: {state}, {audit.update} updates saved ({saved})")
    _print_counts(_ledger_rows(ledger))
    print("Beside the ledger")
    _print_counts(_other_rows(audit))
    if tables := attrition_tables(audit.attrition, audit.windows):
        print("What was sampled and what was trained")
    for _, (header, *rows) in tables:
        _print_table(header, rows)
    for line in attrition_lines(audit.attrition, ledger.num_open):
        print(line)
    for warning in audit.warnings:
        print(f"warning: {safe(warning)}")
    for problem in ledger.problems:
        print(f"PROBLEM {problem}")
    if ledger.balanced:
        print(f"The ledger balances: each of {ledger.released:,} released indexes is in exactly one place.")
    else:
        print("The ledger does NOT balance.")


def _print_counts(rows: Iterable[tuple[str, int | None, str]]) -> None:
    table = _bare_table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    for label, count, remark in rows:
        table.add_row(label, "unknown" if count is None else f"{count:,}", escape(remark))
    print_table(table)


def _ledger_rows(ledger: LedgerCheck) -> list[tuple[str, int | None, str]]:
    return [
        ("released", ledger.released, ""),
        ("trained", ledger.trained, ""),
        ("skipped", ledger.skipped, "no variance in the group"),
        ("dead", ledger.dead, _listed(ledger.dead_reasons)),
        ("on the stream", ledger.on_stream, "generated, not yet settled in the checkpoint"),
        ("claimed", ledger.claimed, "by a producer, alive or not"),
        ("queued", ledger.queued, "prompts that no producer has claimed"),
        ("postponed", ledger.postponed, "to be released again when there is credit"),
        ("cancelled", ledger.cancelled, "open when the run ended"),
    ]


def _other_rows(audit: Audit) -> list[tuple[str, int | None, str]]:
    ledger = audit.ledger
    waiting = f"{ledger.requeued_waiting} dead ones are requeued" if ledger.requeued_waiting else ""
    num_open = audit.num_evaluation_prompts_open
    prompts = "unknown how many prompts are open" if num_open is None else f"{num_open} prompts open"
    always: list[tuple[str, int | None, str]] = [
        ("released again", sum(ledger.released_again.values()), _listed(ledger.released_again)),
        ("duplicates dropped", ledger.duplicates_dropped, ""),
        ("tokens masked for lag", ledger.tokens_masked_lag, ""),
        ("evaluations", audit.num_evaluations, prompts),
        ("dead letters", audit.num_letters, waiting),
        ("settled, on the stream", ledger.settled_on_stream, "trimmed by a commit, or dropped as duplicates"),
    ]
    after_faults = [
        ("settled, a prompt", ledger.settled_prompts, "left over by a fault; their groups are dropped"),
        ("never released", ledger.never_released, "entries that name no released index; they are refused"),
        ("dead without a letter", ledger.dead_without_letter, "Redis has lost the letters"),
    ]
    return [*always, *(row for row in after_faults if row[1])]


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{safe(name)} {count:,}" for name, count in counts.items())


def print_letters(letters: Iterable[Letter]) -> None:
    """Prints the letters of indexes, then those of agents' rollouts."""
    letters = list(letters)
    of_indexes = [letter for letter in letters if letter.rollout is None]
    of_rollouts = [letter for letter in letters if letter.rollout is not None]
    print(f"{len(of_indexes)} dead letters" if of_indexes else "no dead letters")
    if of_indexes:
        header = ("index", "environment", "state", "reason", "time", "producer", "payload")
        _print_table(header, map(_letter_cells, of_indexes))
    if of_rollouts:
        print(f"{len(of_rollouts)} rollouts of agents ended without a reward")
        rows = []
        for letter in of_rollouts:
            index, environment, _, reason, moment, *_ = _letter_cells(letter)
            rows.append((index, environment, letter.rollout or "", reason, moment))
        _print_table(("index", "environment", "rollout", "reason", "time"), rows)


def _letter_cells(letter: Letter) -> tuple[str, ...]:
    return (
        str(letter.index) if letter.index is not None else "-",
        letter.environment or "-",
        letter.state,
        safe(letter.reason),
        _moment(letter.time_s),
        safe(letter.producer) if letter.producer is not None else "-",
        f"{letter.payload_bytes:,} B",
    )


def _moment(time_s: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
    except (OverflowError, OSError):  # an entry id may be any number of 64 bits
        return f"{time_s:.0f} s"


def print_contents(contents: Iterable[Content]) -> None:
    for content in contents:
        _print_content(content)


def print_requeued(done: RequeueResult) -> None:
    if done.indexes:
        print(f"requeued {name_indexes(done.indexes)}: the trainer releases them from its next reconcile on")
    else:
        print("nothing to requeue")
    if done.without_index:
        print(f"{done.without_index} letters name no index, so there is nothing to release for them")


def _print_content(content: Content) -> None:
    """Prints one letter with its content."""
    index, environment, state, reason, moment, producer, size = _letter_cells(content.letter)
    task = index if content.letter.environment is None else f"{index} of {safe(environment)}"
    print(f"letter {content.letter.entry_id}: index {task}, {state}, {moment}, producer {producer}, {size}")
    if content.letter.rollout is not None:
        print(f"rollout  {safe(content.letter.rollout)}")
    print(f"reason   {reason}")
    _print_block("raised", content.traceback)
    if content.problem is not None:
        print(f"payload  {safe(content.problem)}")
    if content.hex_preview is not None:
        print(f"begins   {content.hex_preview}")
    if content.siblings is None:
        return
    _print_block("prompt", content.prompt or "")
    _print_block("answer", content.answer or "")
    for number, sibling in enumerate(content.siblings):
        _print_block(f"says {number}", sibling.completion or "")
    if not content.siblings:
        return
    rows = [
        (
            str(number),
            "none" if sibling.reward is None else f"{sibling.reward:g}",
            ", ".join(f"{name} {value:g}" for name, value in sibling.reward_parts.items()),
            f"{sibling.num_tokens:,}",
            f"{sibling.num_sampled_tokens:,}",
            ", ".join(map(str, sibling.versions)),
            ", ".join(sibling.finish_reasons),
        )
        for number, sibling in enumerate(content.siblings)
    ]
    _print_table(("sibling", "reward", "parts", "tokens", "sampled", "policies", "finish"), rows)


def print_runs(runs: Iterable[ListedRun]) -> None:
    rows = [
        (
            run.name,
            run.state,
            run.model,
            f"{run.num_updates}/{run.num_updates_wanted}" if run.model else "",
            "" if run.reward is None else f"{run.reward:.3f}",
            "" if run.time_s is None else _moment(run.time_s),
        )
        for run in runs
    ]
    if rows:
        _print_table(("run", "state", "model", "updates", "reward", "when"), rows)


def print_producers(producers: Producers) -> None:
    newest = f"newest policy {producers.newest_version}" if producers.newest_version is not None else "no policy yet"
    state = ", finished" if producers.finished else ""
    print(f"Run {producers.run}{state}: {newest}, {len(producers.alive)} producers alive")
    if producers.alive:
        header = ("producer", "policy", "lag", "in flight", "tokens/s", "mismatch", "bad loads", "seen", "host:pid")
        _print_table(header, map(_alive_cells, producers.alive))
    for alive in producers.alive:
        if alive.endpoint:
            print(f"{safe(alive.producer_id)}: agents are served at {safe(alive.endpoint)}")
        if alive.quarantine:
            print(f"{safe(alive.producer_id)}: quarantined, nothing of it is trained: {safe(alive.quarantine)}")
        if alive.last_error:
            print(f"{safe(alive.producer_id)}: last error: {safe(alive.last_error)}")
    for producer_id in producers.unreadable:
        print(f"{safe(producer_id)}: alive, with a heartbeat of another release")
    for orphaned in producers.orphaned:
        print(_orphaned_line(orphaned))


def _alive_cells(alive: Alive) -> tuple[str, ...]:
    oldest_s = alive.oldest_in_flight_s
    return (
        alive.producer_id,
        str(alive.policy_version),
        str(alive.lag) if alive.lag is not None else "unknown",
        str(alive.num_in_flight) + (f" ({oldest_s:.1f} s)" if oldest_s is not None else ""),
        f"{alive.tokens_per_s:,.0f}",
        "-" if alive.mismatch is None else f"{alive.mismatch:.1e}",
        str(alive.num_weight_loads_failed),
        f"{alive.last_seen_s:.1f} s",
        f"{alive.host}:{alive.pid}",
    )


def _orphaned_line(orphaned: Orphaned) -> str:
    held = f"{orphaned.num_prompts} prompts and {orphaned.num_evaluations} evaluations"
    if orphaned.shortest_idle_s >= _HANDED_BACK_S:
        idle = "free for the next producer that claims"
    else:
        idle = f"idle for {orphaned.shortest_idle_s:.1f} to {min(orphaned.longest_idle_s, _HANDED_BACK_S):.1f} s"
    return f"{safe(orphaned.consumer)}: no heartbeat, but it holds {held}, {idle}"


def print_weights(content: LogContent) -> None:
    when = f" of {_moment(content.newest_time_s)}" if content.newest_time_s is not None else ""
    state = ", finished" if content.finished else ""
    kept = len({policy.version for policy in content.policies})
    print(f"Run {content.run}{state}: newest policy {content.newest_version}{when}, {kept} versions kept")
    joining = (
        f"{content.newest_bytes:,} bytes, the anchor and {content.newest_steps - 1} deltas"
        if content.newest_bytes is not None and content.newest_steps is not None
        else "not possible: no anchor leads to the newest policy"
    )
    print(f"joining  {joining}")
    newest_first = content.policies[::-1]
    shown = [policy for n, policy in enumerate(newest_first) if n < _POLICIES_SHOWN or policy.anchor]
    header = ("policy", "kind", "changed", "bytes", "of dense", "steps", "store", "parent", "when")
    _print_table(header, map(_policy_cells, shown))
    if len(shown) < len(newest_first):
        print(f"and {len(newest_first) - len(shown):,} deltas before them; --json has all")
    for problem in content.unreadable:
        print(f"PROBLEM  {safe(problem)}")
    for store in content.stores:
        print(f"store    {_store_line(store)}")
    _print_holders(content)


def _policy_cells(policy: LoggedPolicy) -> tuple[str, ...]:
    whole = "anchor" if policy.anchor else "whole"
    return (
        str(policy.version),
        whole if policy.delta_of is None else f"delta of {policy.delta_of}",
        "" if policy.num_changed is None else _share(policy.num_changed, policy.num_elements),
        f"{policy.chunk_bytes:,}",
        _share(policy.chunk_bytes, policy.dense_bytes),
        str(policy.num_steps) if policy.num_steps is not None else "no anchor",
        policy.store,
        str(policy.parent_version),
        _moment(policy.time_s) if policy.time_s is not None else "",
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "-"


def _store_line(store: StoreContent) -> str:
    line = f"{safe(store.place)}: {store.num_chunks:,} chunks, {store.num_bytes:,} bytes"
    if store.problem:
        return f"{line}; it cannot be listed: {safe(store.problem)}"
    missing = f"; {store.num_missing:,} of them are MISSING" if store.num_missing else ""
    unnamed = f"; {store.num_unnamed:,} more that no policy names" if store.num_unnamed else ""
    return f"{line}{missing}{unnamed}"


def _print_holders(content: LogContent) -> None:
    if content.holders:
        _print_table(("policy", "lag", "producers", "on hosts", "which"), map(_holder_cells, content.holders))
    else:
        print("no producer is alive")
    if content.num_unreadable:
        print(f"{content.num_unreadable} producers send heartbeats of another release")


def _holder_cells(held: PolicyHolders) -> tuple[str, ...]:
    return (
        str(held.version),
        str(held.lag) if held.lag is not None else "unknown",
        str(len(held.producers)),
        _some([f"{host} ({count})" if count > 1 else host for host, count in held.hosts.items()]),
        _some(held.producers),
    )


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _NAMES_SHOWN:,} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + rest


def _print_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Prints a table, its cells escaped."""
    table = _bare_table()
    for number, column in enumerate(header):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    for row in rows:
        table.add_row(*(escape(safe(cell)) for cell in row))
    print_table(table)


def _bare_table(*, show_header: bool = True) -> Table:
    return Table(box=box.SIMPLE_HEAD, show_header=show_header, pad_edge=False, padding=(0, 1, 0, 0))


def _print_block(label: str, text: str) -> None:
    """Prints a text of several lines; nothing if it is empty."""
    for number, line in enumerate(text.expandtabs(4).splitlines()):
        print(f"{'' if number else label:8} {safe(line)}")


def safe(text: str) -> str:
    """Returns the text with every unprintable character escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
