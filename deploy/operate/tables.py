"""Prints the results of the operator's commands on standard output.

Reasons, prompts and names come from producers: control characters in them are shown escaped.
"""

from collections.abc import Iterable, Sequence

from penstock.deploy.operate.audit import Audit
from penstock.deploy.operate.dead_letters import Content, Letter, RequeueResult, Sibling
from penstock.deploy.operate.ledger_check import LedgerCheck, name_indexes
from penstock.deploy.operate.printing import Columns, moment, print_block, print_columns, print_counts, print_rows, safe
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
    print_counts(_ledger_rows(ledger))
    print("Beside the ledger")
    print_counts(_other_rows(audit))
    if tables := attrition_tables(audit.attrition, audit.windows):
        print("What was sampled and what was trained")
    for _, (header, *rows) in tables:
        print_rows(header, rows)
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
        print_columns(_LETTER_COLUMNS, of_indexes)
    if of_rollouts:
        print(f"{len(of_rollouts)} rollouts of agents ended without a reward")
        columns = {name: _LETTER_COLUMNS[name] for name in ("index", "environment")}
        columns["rollout"] = lambda letter: letter.rollout or ""
        print_columns(columns | {name: _LETTER_COLUMNS[name] for name in ("reason", "time")}, of_rollouts)


_LETTER_COLUMNS: Columns[Letter] = {
    "index": lambda letter: _known(letter.index),
    "environment": lambda letter: _known(letter.environment),
    "state": lambda letter: letter.state,
    "reason": lambda letter: letter.reason,
    "time": lambda letter: moment(letter.time_s),
    "producer": lambda letter: _known(letter.producer),
    "payload": lambda letter: f"{letter.payload_bytes:,} B",
}


def _known(value: object) -> str:
    return "-" if value is None else str(value)


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
    letter = content.letter
    task = _known(letter.index) + (f" of {safe(letter.environment)}" if letter.environment is not None else "")
    print(
        f"letter {letter.entry_id}: index {task}, {letter.state}, {moment(letter.time_s)}, "
        f"producer {safe(_known(letter.producer))}, {letter.payload_bytes:,} B"
    )
    if letter.rollout is not None:
        print(f"rollout  {safe(letter.rollout)}")
    print(f"reason   {safe(letter.reason)}")
    print_block("raised", content.traceback)
    if content.problem is not None:
        print(f"payload  {safe(content.problem)}")
    if content.hex_preview is not None:
        print(f"begins   {content.hex_preview}")
    if content.siblings is None:
        return
    print_block("prompt", content.prompt or "")
    print_block("answer", content.answer or "")
    for number, sibling in enumerate(content.siblings):
        print_block(f"says {number}", sibling.completion or "")
    if content.siblings:
        print_columns(_SIBLING_COLUMNS, list(enumerate(content.siblings)))


_SIBLING_COLUMNS: Columns[tuple[int, Sibling]] = {
    "sibling": lambda numbered: str(numbered[0]),
    "reward": lambda numbered: "none" if numbered[1].reward is None else f"{numbered[1].reward:g}",
    "parts": lambda numbered: ", ".join(f"{name} {value:g}" for name, value in numbered[1].reward_parts.items()),
    "tokens": lambda numbered: f"{numbered[1].num_tokens:,}",
    "sampled": lambda numbered: f"{numbered[1].num_sampled_tokens:,}",
    "policies": lambda numbered: ", ".join(map(str, numbered[1].versions)),
    "finish": lambda numbered: ", ".join(numbered[1].finish_reasons),
}


def print_runs(runs: Iterable[ListedRun]) -> None:
    columns: Columns[ListedRun] = {
        "run": lambda run: run.name,
        "state": lambda run: run.state,
        "model": lambda run: run.model,
        "updates": lambda run: f"{run.num_updates}/{run.num_updates_wanted}" if run.model else "",
        "reward": lambda run: "" if run.reward is None else f"{run.reward:.3f}",
        "when": lambda run: "" if run.time_s is None else moment(run.time_s),
    }
    print_columns(columns, list(runs))


def print_producers(producers: Producers) -> None:
    newest = f"newest policy {producers.newest_version}" if producers.newest_version is not None else "no policy yet"
    state = ", finished" if producers.finished else ""
    print(f"Run {producers.run}{state}: {newest}, {len(producers.alive)} producers alive")
    print_columns(_ALIVE_COLUMNS, producers.alive)
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


_ALIVE_COLUMNS: Columns[Alive] = {
    "producer": lambda alive: alive.producer_id,
    "policy": lambda alive: str(alive.policy_version),
    "lag": lambda alive: _lag(alive.lag),
    "in flight": lambda alive: (
        f"{alive.num_in_flight}"
        + (f" ({alive.oldest_in_flight_s:.1f} s)" if alive.oldest_in_flight_s is not None else "")
    ),
    "tokens/s": lambda alive: f"{alive.tokens_per_s:,.0f}",
    "mismatch": lambda alive: "-" if alive.mismatch is None else f"{alive.mismatch:.1e}",
    "bad loads": lambda alive: str(alive.num_weight_loads_failed),
    "seen": lambda alive: f"{alive.last_seen_s:.1f} s",
    "host:pid": lambda alive: f"{alive.host}:{alive.pid}",
}


def _lag(lag: int | None) -> str:
    return "unknown" if lag is None else str(lag)


def _orphaned_line(orphaned: Orphaned) -> str:
    held = f"{orphaned.num_prompts} prompts and {orphaned.num_evaluations} evaluations"
    if orphaned.shortest_idle_s >= _HANDED_BACK_S:
        idle = "free for the next producer that claims"
    else:
        idle = f"idle for {orphaned.shortest_idle_s:.1f} to {min(orphaned.longest_idle_s, _HANDED_BACK_S):.1f} s"
    return f"{safe(orphaned.consumer)}: no heartbeat, but it holds {held}, {idle}"


def print_weights(content: LogContent) -> None:
    when = f" of {moment(content.newest_time_s)}" if content.newest_time_s is not None else ""
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
    print_columns(_POLICY_COLUMNS, shown)
    if len(shown) < len(newest_first):
        print(f"and {len(newest_first) - len(shown):,} deltas before them; --json has all")
    for problem in content.unreadable:
        print(f"PROBLEM  {safe(problem)}")
    for store in content.stores:
        print(f"store    {_store_line(store)}")
    _print_holders(content)


_POLICY_COLUMNS: Columns[LoggedPolicy] = {
    "policy": lambda policy: str(policy.version),
    "kind": lambda policy: (
        f"delta of {policy.delta_of}" if policy.delta_of is not None else ("anchor" if policy.anchor else "whole")
    ),
    "changed": lambda policy: "" if policy.num_changed is None else _share(policy.num_changed, policy.num_elements),
    "bytes": lambda policy: f"{policy.chunk_bytes:,}",
    "of dense": lambda policy: _share(policy.chunk_bytes, policy.dense_bytes),
    "steps": lambda policy: str(policy.num_steps) if policy.num_steps is not None else "no anchor",
    "store": lambda policy: policy.store,
    "parent": lambda policy: str(policy.parent_version),
    "when": lambda policy: moment(policy.time_s) if policy.time_s is not None else "",
}


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
    columns: Columns[PolicyHolders] = {
        "policy": lambda held: str(held.version),
        "lag": lambda held: _lag(held.lag),
        "producers": lambda held: str(len(held.producers)),
        "on hosts": lambda held: _some(
            [f"{host} ({count})" if count > 1 else host for host, count in held.hosts.items()]
        ),
        "which": lambda held: _some(held.producers),
    }
    print_columns(columns, content.holders)
    if not content.holders:
        print("no producer is alive")
    if content.num_unreadable:
        print(f"{content.num_unreadable} producers send heartbeats of another release")


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _NAMES_SHOWN:,} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + rest
