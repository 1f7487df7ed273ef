"""Taking over the rollouts of an earlier holder of a prompt; see penstock.producers.rollout.adoption."""

from collections.abc import Mapping

import msgspec

from penstock.producers.endpoint.call_ledger import Call
from penstock.producers.endpoint.groups import AgentGroup, AgentRollout
from penstock.producers.endpoint.recording import KeptCall, KeptRollout
from penstock.producers.rollout.adoption import UnusableProgressError, check_origin, check_versions
from penstock.producers.rollout.episode import UNSCORED, rollout_of
from penstock.schemas.rollout import Rollout, decode_group, encode_group, one_line
from penstock.schemas.segments import segments

_rollouts = msgspec.msgpack.Decoder(KeptRollout)
_calls = msgspec.msgpack.Decoder(KeptCall)


def adopt(group: AgentGroup, parts: Mapping[str, bytes], *, held: int, lag_bound: int, replay: bool) -> int:
    """Puts the rollouts of an earlier holder into a group; returns the number of their tokens.

    Finished ones are complete. The calls of one whose agent is outside are in its ledger again; its last request, if it
    is repeated, gets the recorded answer or the rest of it: whether the agent has read it is not known.

    Args:
        group: to be sampled here, without rollouts.
        parts: as `AgentGroup.parts` makes them.
        held: version of the policy that the engine holds.
        replay: conversations are held inside the producer and start again; the calls that they repeat get their
            recorded answers, and only those are in the ledger.

    Raises:
        UnusableProgressError: it is torn, of another prompt, engine or sampling, or of policies that are too far from
            the one held; or it holds what no record may. The group is unchanged.
    """
    here = group.record()
    try:
        found = decode_group(parts["group"], dead=True)
        group.claim.num_lost_before = found.num_tries_lost + 1
        if (found.index, found.prompt) != (here.index, here.prompt):
            raise UnusableProgressError(f"index {found.index} and its prompt, expected this one of index {here.index}")
        check_origin(found, here)
        num_rollouts = max((int(name.split(".")[1]) + 1 for name in parts if "." in name), default=0)
        if num_rollouts > group.size:
            raise UnusableProgressError(f"{num_rollouts} siblings, expected at most {group.size}")
        rollouts, checked, versions, num_tokens = [], list[Rollout](), set[int](), 0
        for n in range(num_rollouts):
            kept = _rollouts.decode(parts[f"rollouts.{n}"])
            calls, left = _calls_in(parts, f"calls.{n}."), _calls_in(parts, f"left.{n}.")
            rollout = _restored(group, kept, calls, left, replay=replay)
            rollouts.append(rollout)
            sampled = [] if kept.finished is None else [kept.finished]
            sampled += [rollout_of(b"", call.completion, UNSCORED) for call in (*calls, *left)]
            num_tokens += sum(one.num_sampled_tokens for one in sampled)
            versions |= {span.version for one in sampled for part in one.segments for span in part.version_spans}
            if chains := segments(rollout.ledger.recorded())[0]:
                sampled.append(Rollout(segments=tuple(chain.segment for chain in chains), reward=UNSCORED))
            checked += sampled
        for one in checked:  # one by one: together, every call twice, they may exceed an entry
            whole = msgspec.structs.replace(here, rollouts=(one,))
            decode_group(encode_group(whole, dead=True), dead=True)
    except UnusableProgressError:
        raise
    except Exception as error:  # another process's record: whatever is in it must not end this producer
        why = f"part {error} is missing" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise UnusableProgressError(one_line(why)) from error
    check_versions(versions, held, lag_bound)
    for rollout in rollouts:
        rollout.is_waiting = replay and rollout.is_open
        if rollout.is_waiting:
            rollout.ledger = group.new_ledger()
    group.rollouts = rollouts
    if rollouts:
        group.begin()
    group.claim.num_lost_before, group.claim.sampled_by = found.num_tries_lost, found.samplers
    return num_tokens


def _calls_in(parts: Mapping[str, bytes], prefix: str) -> list[KeptCall]:
    """Returns the calls whose parts have this prefix, in the order of the numbers after it."""
    names = sorted((name for name in parts if name.startswith(prefix)), key=lambda name: int(name[len(prefix) :]))
    return [_calls.decode(parts[name]) for name in names]


def _restored(
    group: AgentGroup, kept: KeptRollout, calls: list[KeptCall], left: list[KeptCall], *, replay: bool
) -> AgentRollout:
    rollout = AgentRollout(kept.id, group, group.new_ledger())
    rollout.finished, rollout.reason, rollout.is_abandoned = kept.finished, kept.reason, kept.is_abandoned
    if not rollout.is_open:
        return rollout
    answered: dict[int, Call] = {}
    for call in calls:
        if call.is_answered:
            answered[call.number] = Call(
                number=call.number,
                base=None if call.base < 0 else answered[call.base],
                context=call.context,
                completion=call.completion,
                rendered=None,
                request=call.request,
                chain=call.chain,
                reply=call.reply,
            )
    rollout.ledger.restore(list(answered.values()), kept.unread)
    # In a replay, calls that the last holder has answered again come before those left; else the newest answer counts.
    again = [*calls, *left] if replay else {call.request: call for call in (*left, *calls)}.values()
    for call in again:
        rollout.recorded.add(call, in_ledger=not replay and call.is_answered)
    return rollout
