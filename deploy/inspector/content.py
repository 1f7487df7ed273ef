"""Converts a group to JSON, token by token, for the page and for export lines."""

import math
from typing import Any, NamedTuple

import msgspec

from penstock.deploy.report.tokens import TokenTexts
from penstock.schemas.images import data_url
from penstock.schemas.record import BatchHead, Findings, GroupEntry, SegmentFindings, sampled_tokens
from penstock.schemas.rollout import RolloutGroup, Segment, unpack_ids

_BEGINNING = 80
_ENTRY_FIELDS = (
    "outcome", "reason", "producer_id", "environment", "rewards", "finish_reasons", "num_sampled_tokens", "num_masked",
    "ess_fraction", "max_weight",
)  # fmt: skip
_BATCH_FIELDS = ("position", "policy_version", "time_s", "counts", "skipped_reason")
_SHOWN_METRICS = ("loss", "reward", "ess_fraction", "chi2", "mismatch_lag0")


class InspectedRow(NamedTuple):
    """A group as the list shows it.

    key: its name in links. number: grows in order of arrival. update: the update that its batch made.
    """

    key: str
    number: int
    update: int
    entry: GroupEntry


class InspectedGroup(NamedTuple):
    """One whole group.

    group: None if its bytes cannot be decoded; `problem` then says why.
    findings: by rollout and segment; a lag of -1 is unknown.
    remark: the policy that its lags are counted from.
    """

    row: InspectedRow
    group: RolloutGroup | None
    findings: Findings
    batch: BatchHead
    remark: str
    problem: str = ""


def row_fields(row: InspectedRow) -> dict[str, Any]:
    """Returns a row of the list."""
    entry = row.entry
    return {name: getattr(entry, name) for name in _ENTRY_FIELDS} | {
        "key": row.key,
        "number": row.number,
        "update": row.update,
        "index": entry.index or None,
        "task": entry.task or None,
        "versions": [entry.min_version, entry.max_version] if entry.max_version >= 0 else None,
        "lags": [entry.min_lag, entry.max_lag] if entry.num_sampled_tokens else None,
    }


def group_fields(inspected: InspectedGroup, texts: TokenTexts | None) -> dict[str, Any]:
    """Returns a whole group. Numbers by token are columns: a value per sampled token, None if the trainer has none."""
    row, group, batch = inspected.row, inspected.group, inspected.batch
    fields: dict[str, Any] = row_fields(row) | {"remark": inspected.remark, "problem": inspected.problem}
    fields["batch"] = {name: getattr(batch, name) for name in _BATCH_FIELDS} | {
        "num_groups": len(batch.groups),
        "metrics": {name: batch.metrics[name] for name in _SHOWN_METRICS if name in batch.metrics},
    }
    if group is None:
        return fields
    advantages = row.entry.advantages
    return fields | {
        "prompt": {"text": group.prompt.text, "messages": msgspec.to_builtins(group.prompt.messages)},
        "images": {digest: data_url(data) for digest, data in (group.images or {}).items() if data},
        "answer": group.prompt.answer,
        "metadata": group.prompt.metadata,
        "producer_id": group.producer_id,
        "sampling": msgspec.to_builtins(group.sampling),
        "fingerprint": msgspec.to_builtins(group.fingerprint),
        "timings": msgspec.to_builtins(group.timings),
        "missing": _missing(inspected),
        "rollouts": [
            {
                "reward": rollout.reward.value,
                "parts": rollout.reward.parts,
                "advantage": advantages[r] if r < len(advantages) else None,
                "num_sampled_tokens": rollout.num_sampled_tokens,
                "segments": [
                    _segment_fields(segment, _found(inspected, r, s, segment), texts)
                    for s, segment in enumerate(rollout.segments)
                ],
            }
            for r, rollout in enumerate(group.rollouts)
        ],
    }


def beginning(group: RolloutGroup | None) -> str:
    """Returns the first `_BEGINNING` characters of the prompt, or of its last message, on one line."""
    if group is None:
        return ""
    text = group.prompt.messages[-1].text if group.prompt.messages else group.prompt.text or ""
    return " ".join(text[: 4 * _BEGINNING].split())[:_BEGINNING]


def searched_text(group: RolloutGroup | None) -> str:
    """Returns the text that the list searches, case-folded."""
    if group is None:
        return ""
    prompt = group.prompt
    parts = [prompt.text or "", *(message.text for message in prompt.messages or ()), prompt.answer]
    parts += [text for pair in prompt.metadata.items() for text in pair]
    return "\n".join(parts).casefold()


def _missing(inspected: InspectedGroup) -> list[str]:
    """Names the parts of a group that the token view cannot show, and says why."""
    scored = [bool(found.kept) for of_rollout in inspected.findings for found in of_rollout]
    if all(scored):
        return []
    which = "no token" if not any(scored) else f"{scored.count(False)} of {len(scored)} segments not"
    whys = {"skipped": "its rewards do not differ", "dead": "it died before"}
    why = whys.get(inspected.row.entry.outcome, "every token lies past the lag bound")
    return [f"proximal logprobs and weights: {which} scored ({why})"]


def _found(inspected: InspectedGroup, r: int, s: int, segment: Segment) -> SegmentFindings:
    """Returns the findings of a segment; lags are -1 (unknown) if the record has none that fit the segment."""
    try:
        found = inspected.findings[r][s]
    except IndexError:
        found = SegmentFindings(())
    if len(found.lags) != len(segment.version_spans):
        found = msgspec.structs.replace(found, lags=(-1,) * len(segment.version_spans))
    num_sampled = segment.num_sampled_tokens
    fits = len(found.kept) * 4 == len(found.proximal_logprobs) == len(found.importance_weights) == num_sampled * 4
    return found if fits else SegmentFindings(found.lags)


def _segment_fields(segment: Segment, found: SegmentFindings, texts: TokenTexts | None) -> dict[str, Any]:
    token_ids = list(unpack_ids(segment.token_ids))
    tokens = sampled_tokens(segment, found)
    fields: dict[str, Any] = {
        "finish_reason": segment.finish_reason,
        "token_ids": token_ids,
        "positions": [token.position for token in tokens],
        "versions": [token.version if token.version >= 0 else None for token in tokens],
        "lags": [token.lag if token.lag >= 0 else None for token in tokens],
        "behavior_logprobs": [token.behavior_logprob for token in tokens],
        "proximal_logprobs": [_finite(token.proximal_logprob) for token in tokens],
        "importance_weights": [_finite(token.importance_weight) for token in tokens],
        "kept": [token.is_kept for token in tokens],
        "images": list(map(msgspec.structs.astuple, segment.images or ())),
    }
    if texts is not None:
        shown = texts.texts(token_ids)
        fields["texts"] = [text for text, _ in shown]
        fields["marks"] = {n: mark for n, (_, mark) in enumerate(shown) if mark}
    return fields


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
