"""Taking over the rollouts of an earlier holder of a prompt; see penstock.producers.rollout.adoption."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.producers.endpoint.call_ledger import Call
from penstock.producers.endpoint.groups import AgentGroup, AgentRollout
from penstock.producers.endpoint.recording import Acted, Begun, Ended, KeptCall, Opened, Unread, decode
from penstock.producers.observe.running_loop import running_s
from penstock.producers.rollout.adoption import UnusableProgressError, check_origin, check_versions
from penstock.producers.rollout.sampling import join
from penstock.schemas.rollout import RolloutGroup, decode_entry, one_line


@dataclass
class _KeptRollout:
    """One rollout as its journal has it.

    calls: by number; one that replaces another is in its place, with all that both have sampled.
    answered: the answered calls by number.
    places: the number under which each call is in `calls`.
    """

    id: str
    calls: dict[int, KeptCall] = field(default_factory=dict)
    answered: dict[int, KeptCall] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)
    unread: set[int] = field(default_factory=set)
    acts: list[Acted] = field(default_factory=list)
    ended: Ended | None = None

    def take(self, entry: KeptCall) -> None:
        place = self.places.get(entry.number, self.places.get(entry.replaces, entry.number))
        if entry.start:
            before = self.calls[place].completion
            if before.num_tokens < entry.start:
                raise UnusableProgressError(f"call {entry.number} lacks tokens {before.num_tokens} to {entry.start}")
            entry = replace(entry, completion=join([before.part(0, entry.start), entry.completion]))
        self.calls[place] = entry
        self.places[entry.number] = place
        if entry.is_answered:
            self.answered[entry.number] = entry

    def restored(self, group: AgentGroup, *, replay: bool) -> AgentRollout:
        rollout = AgentRollout(self.id, group, group.new_ledger())
        if self.places:
            rollout.last_seen = running_s()
        kept = self.answered if self.ended is None else {number: self.answered[number] for number in self.ended.calls}
        calls: dict[int, Call] = {}
        files = dict(rollout.ledger.files)
        for call in self.answered.values():
            files |= call.files
        for number, call in kept.items():
            calls[number] = Call(
                number=number,
                base=None if call.base < 0 else calls[call.base],
                context=call.context,
                completion=call.completion,
                rendered=None,
                request=call.request,
                chain=call.chain,
                reply=call.reply,
                began_s=call.began_s,
                ended_s=call.ended_s,
                images=call.images,
                files={place.digest: files[place.digest] for place in call.images},
            )
        rollout.ledger.num_begun = 1 + max(self.places, default=-1)
        if self.ended is None and replay:
            rollout.is_waiting, rollout.earlier, rollout.earlier_acts = True, list(self.calls.values()), self.acts
        elif self.ended is None or self.ended.reward is not None:
            rollout.ledger.restore(list(calls.values()), self.unread)
            # The newest answer to a request counts.
            rollout.earlier = list({call.request: call for call in self.calls.values()}.values())
        if self.ended is not None:
            for answered in rollout.ledger.calls:
                answered.delivered = answered.number in self.ended.read
                answered.is_trained = answered.number not in self.ended.untrained
            rollout.restore_end(self.ended)
        return rollout


def adopt(group: AgentGroup, entries: Sequence[bytes], *, held: int, lag_bound: int, replay: bool) -> int:
    """Puts the rollouts of an earlier holder into a group; returns the number of their tokens.

    Finished ones are complete. The calls of one whose agent is outside are in its ledger again; its last request, if it
    is repeated, gets the recorded answer or the rest of it: whether the agent has read it is not known.

    Args:
        group: to be sampled here, without rollouts.
        entries: of the journal.
        held: version of the policy that the engine holds.
        replay: conversations are held inside the producer and start again; the calls that they repeat get their
            recorded answers, and only those are in the ledger.

    Raises:
        UnusableProgressError: it is torn, of another prompt, engine or sampling, or of policies that are too far from
            the one held. The group is unchanged.
    """
    here = group.record()
    try:
        found, kept_rollouts = _read(entries)
        group.claim.num_lost_before = found.num_tries_lost + 1
        if (found.index, found.prompt) != (here.index, here.prompt):
            raise UnusableProgressError(f"index {found.index} and its prompt, expected this one of index {here.index}")
        check_origin(found, here)
        if len(kept_rollouts) > group.size:
            raise UnusableProgressError(f"{len(kept_rollouts)} siblings, expected at most {group.size}")
        rollouts, versions, num_tokens = [], set[int](), 0
        for kept in kept_rollouts:
            rollouts.append(rollout := kept.restored(group, replay=replay))
            if not rollout.reason:
                completions = [call.completion for call in kept.calls.values()]
                num_tokens += sum(completion.num_tokens for completion in completions)
                versions |= {span.version for completion in completions for span in completion.version_spans}
    except UnusableProgressError:
        raise
    except Exception as error:  # another process's record: whatever is in it must not end this producer
        is_call = isinstance(error, KeyError) and isinstance(error.args[0], int)
        why = f"call {error} is missing" if is_call else f"{type(error).__name__}: {error}"
        raise UnusableProgressError(one_line(why)) from error
    check_versions(versions, held, lag_bound)
    group.claim.num_lost_before, group.claim.sampled_by = found.num_tries_lost, found.samplers
    if rollouts:
        group.continue_with(rollouts, entries[1:], num_tokens)
        if not replay:
            group.start()
    return num_tokens


def _read(entries: Sequence[bytes]) -> tuple[RolloutGroup, list[_KeptRollout]]:
    """Returns the group, without rollouts, and its rollouts."""
    first = decode(entries[0])
    if not isinstance(first, Begun):
        raise UnusableProgressError("its beginning is missing")
    rollouts: list[_KeptRollout] = []
    for data in entries[1:]:
        match decode(data):
            case Opened(id):
                rollouts.append(_KeptRollout(id))
            case KeptCall() as call:
                rollouts[call.rollout].take(call)
            case Unread(n, number):
                rollouts[n].unread.add(number)
            case Acted() as act:
                rollouts[act.rollout].acts.append(act)
            case Ended() as ended:
                rollouts[ended.rollout].ended = ended
            case Begun():
                raise UnusableProgressError("it begins twice")
    return decode_entry(first.group, dead=True), rollouts
