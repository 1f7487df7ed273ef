"""The kinds of faults. Each does its harm, arranges the repair that an operator would bring, and says what it did."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from cutting_proxy import When
from tests.chaos import roles
from tests.chaos.aim import Fate, Place
from tests.chaos.leg import Leg
from tests.chaos.losses import GRACE_S
from tests.chaos.proxy import PRODUCER_COMMANDS, TRAINER_COMMANDS
from tests.chaos.roles import LONGEST
from tests.chaos.tally import requests_in
from weight_host import corrupt_copy

if TYPE_CHECKING:
    from tests.chaos.storm import Seat, Storm


@dataclass(frozen=True)
class FaultKind:
    """One kind of fault.

    harm: does it, with draws of its own, and returns what was done; None where it makes no sense at this moment, or is
    not over yet.
    weight: how often it comes, beside the others.
    """

    name: str
    about: str
    weight: int
    harm: Callable[["Storm", Random], str | None]


def _producer_kill(storm: "Storm", draw: Random) -> str | None:
    seat = storm.producer(draw)
    if seat.process is None:
        return None
    renamed = draw.random() < 0.4
    seat.process.kill()
    delay_s = storm.restart_later(seat, draw.uniform(0.0, 1.5))
    if renamed:
        storm.rename(seat)
    return f"{seat.was}, back after {delay_s:.1f} s as {seat.name}"


def _producer_term(storm: "Storm", draw: Random) -> str | None:
    seat = storm.producer(draw)
    if seat.process is None or seat.process.is_stopped:
        return None
    seat.process.tell_to_stop()
    delay_s = storm.restart_later(seat, draw.uniform(0.0, 1.5))
    return f"{seat.name}, back {delay_s:.1f} s after it has left"


def _producer_freeze(storm: "Storm", draw: Random) -> str | None:
    seat = storm.producer(draw)
    if seat.process is None or seat.process.is_stopped:
        return None
    seconds = draw.uniform(0.1, 3.0)
    process = seat.process
    process.freeze()
    storm.later(seconds, process.thaw)
    return f"{seat.name} for {seconds:.1f} s"


def _trainer_kill(storm: "Storm", draw: Random) -> str | None:
    seat = storm.trainer(draw)
    if seat.process is None:
        return None
    seat.process.kill()
    return f"{seat.name}, {storm.succession} after {storm.restart_later(seat, draw.uniform(0.0, 1.0)):.1f} s"


def _trainer_term(storm: "Storm", draw: Random) -> str | None:
    seat = storm.trainer(draw)
    if seat.process is None or seat.process.is_stopped:
        return None
    seat.process.tell_to_stop()
    return f"{seat.name}, {storm.succession} {storm.restart_later(seat, draw.uniform(0.0, 0.5)):.1f} s after its end"


def _trainer_freeze(storm: "Storm", draw: Random) -> str | None:
    process = storm.trainer(draw).process
    if process is None or process.is_stopped:
        return None
    seconds = draw.uniform(0.1, 3.0)
    process.freeze()
    storm.later(seconds, process.thaw)
    return f"{process.name} for {seconds:.1f} s"


def _trainer_replace(storm: "Storm", draw: Random) -> str | None:
    seat = storm.trainer(draw)
    process = seat.process
    if process is None or process.is_stopped or process.was_told_to_stop:
        return None
    process.freeze()
    if len(storm.trainers) > 1:
        # The other one waits for the lease to run out, and for as long again.
        seconds = draw.uniform(2.0, 5.0)
        storm.later(seconds, process.thaw)
        return f"{seat.name} frozen for {seconds:.1f} s, the other takes over"
    seconds = draw.uniform(0.5, 3.0)
    storm.give_up(seat)
    storm.later(seconds, process.thaw)
    return f"{seat.name} frozen, a second one resumes at once, the first wakes after {seconds:.1f} s"


def _redis_kill(storm: "Storm", draw: Random) -> str | None:
    if not storm.server.is_running:
        return None
    storm.server.kill()
    return f"back after {storm.redis_later(draw.uniform(0.0, 2.0)):.1f} s"


def _redis_power_loss(storm: "Storm", draw: Random) -> str | None:
    if not storm.server.is_running:
        return None
    lost = storm.server.lose_power(draw)
    return f"{lost}; back after {storm.redis_later(draw.uniform(0.0, 1.0)):.1f} s"


def _machine_power_loss(storm: "Storm", draw: Random) -> str | None:
    if not storm.server.is_running:
        return None
    for seat in storm.seats:
        if seat.process is not None:
            (seat.process.destroy if seat in storm.trainers else seat.process.kill)()  # its ranks with it
            storm.restart_later(seat, draw.uniform(0.2, 1.0))
    lost = storm.server.lose_power(draw)
    return f"every process killed; {lost}; back after {storm.redis_later(draw.uniform(0.0, 0.3)):.1f} s"


def _redis_emptied(storm: "Storm", draw: Random) -> str | None:
    if not storm.server.is_running:
        return None
    storm.server.empty()
    return f"back with nothing after {storm.redis_later(draw.uniform(0.0, 1.0)):.1f} s"


def _redis_freeze(storm: "Storm", draw: Random) -> str | None:
    if not storm.server.is_running or storm.server.is_stopped:
        return None
    seconds = draw.uniform(0.1, 2.0)
    child = storm.server.child
    storm.server.freeze()
    storm.later(seconds, lambda: storm.server.thaw() if storm.server.child is child else None)
    return f"for {seconds:.1f} s"


def _redis_full(storm: "Storm", draw: Random) -> str | None:
    if not storm.server.answers():
        return None
    room, seconds = draw.randrange(0, 200_000), draw.uniform(0.3, 2.0)
    storm.server.limit_memory(room)
    storm.later(seconds, lambda: storm.server.limit_memory(None) if storm.server.answers() else None)
    return f"{room:,} bytes below its limit for {seconds:.1f} s"


def _cut(storm: "Storm", draw: Random) -> str | None:
    seat, seconds = storm.any_seat(draw), draw.choice([0.0, draw.uniform(0.1, 3.0)])
    storm.proxy.cut(seat.socket, seconds)
    return f"every connection of {seat.name}, and new ones refused for {seconds:.1f} s"


def _cut_command(storm: "Storm", draw: Random) -> str | None:
    seat = storm.any_seat(draw)
    command = draw.choice(TRAINER_COMMANDS if seat in storm.trainers else PRODUCER_COMMANDS)
    when: When = draw.choice(["before", "reply", "reply", "within"])
    nth = draw.randrange(1, 6)
    storm.proxy.cut_command(seat.socket, command, nth, when)
    how = {"before": "before it is sent", "reply": "before its reply", "within": "within its reply"}[when]
    return f"{seat.name} loses its connection at {command} number {nth} from here on, {how}"


def _disk_full(storm: "Storm", draw: Random) -> str | None:
    assert storm.disk is not None
    room, seconds = draw.randrange(0, 400_000), draw.uniform(0.3, 2.5)
    storm.disk.fill(room)
    storm.later(seconds, storm.disk.drain)
    return f"{room:,} bytes left for {seconds:.1f} s"


def _checkpoint_corrupt(storm: "Storm", draw: Random) -> str | None:
    """Only where a whole predecessor is there: with none the policy is lost, and no protocol brings it back."""
    seats = [seat for seat in storm.trainers if seat.process is not None]
    if not seats:
        return None
    for seat in seats:
        assert seat.process is not None
        seat.process.destroy()
        delay_s = storm.restart_later(seat, draw.uniform(0.0, 0.5))
    whole = storm.whole_checkpoints()
    if len(whole) < 2:
        return f"no other is whole: only the trainer is killed, back after {delay_s:.1f} s"
    newest = whole[-1]
    file = draw.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
    harm = draw.choice(["torn", "flipped", "missing"])
    if harm == "torn":
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
    elif harm == "flipped":
        flipped = bytearray(file.read_bytes())
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
        file.write_bytes(flipped)
    else:
        file.unlink()
    storm.spoiled.add(newest.name)
    return f"{file.relative_to(newest)} of the newest is {harm}, the trainer killed, back after {delay_s:.1f} s"


def _chunk_harmed(storm: "Storm", draw: Random) -> str | None:
    """One of the newest policy's, which no producer may hold yet, or any other one."""
    if not storm.server.answers():
        return None
    client, name = storm.server.client, storm.keys.chunks
    found: Any = client.hkeys(name)
    if not found:
        return None
    newest = max(int(key.partition(b"-")[0]) for key in found)
    recent = [key for key in sorted(found) if int(key.partition(b"-")[0]) == newest]
    key = draw.choice(recent if draw.random() < 0.7 else sorted(found))
    data: Any = client.hget(name, key)
    harm = draw.choice(["lost", "flipped", "cut short"])
    if data is None:
        return None
    if harm == "lost":
        client.hdel(name, key)
    else:
        at = draw.randrange(len(data))
        flipped = data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        client.hset(name, key, data[:at] if harm == "cut short" else flipped)
    return f"{key.decode()} is {harm}"


def _anchors_lost(storm: "Storm", draw: Random) -> str | None:
    if not storm.server.answers():
        return None
    num_anchors: Any = storm.server.client.hlen(storm.keys.anchors)
    storm.server.client.delete(storm.keys.anchors)
    return f"{num_anchors} of them"


def _copy_harmed(storm: "Storm", draw: Random) -> str | None:
    """While nobody loads from it; bytes that are changed behind a clean state have tests of their own."""
    folders = sorted(storm.host_folder.glob("penstock-*-chaos-*"))
    if not folders:
        return None
    harm = draw.choice(["torn", "stateless", "cut short", "removed"])
    try:
        corrupt_copy(folders[0], harm, wait=False)
    except (OSError, ValueError):  # it is in use, or not whole at this moment
        return None
    return f"it is {harm}"


def _producer_killed_in_patch(storm: "Storm", draw: Random) -> str | None:
    aim = storm.folder / roles.KILL_IN_PATCH
    struck = set(storm.folder.glob(f"{roles.KILL_IN_PATCH}.*")) - storm.struck
    if struck:
        storm.struck |= struck
        return f"process {struck.pop().suffix[1:]}"
    aim.touch()
    return None


def _hit(place: Place, fate: Fate, rank: int | None = None) -> Callable[["Storm", Random], str | None]:
    def harm(storm: "Storm", draw: Random) -> str | None:
        assert storm.hits is not None
        return storm.hits.hit(place, fate, rank, draw)

    return harm


def _in_long_rollouts(harm: Callable[["Storm", "Seat"], str], how: str) -> Callable[["Storm", Random], str | None]:
    """Where a rollout of one that is drawn is at half of the longest or beyond, and goes on."""

    def end(storm: "Storm", draw: Random) -> str | None:
        seat = storm.producer(draw)
        if seat.process is None or seat.number is None or seat.number in storm.ended:
            return None
        running = [each for each in requests_in(storm.sampled / str(seat.number)) if each.num_sampled < each.num_wanted]
        furthest = max((each.num_sampled for each in running), default=0)
        if furthest < LONGEST // 2:
            return None
        storm.ended[seat.number] = how
        return f"{seat.name} at token {furthest} of {len(running)} requests{harm(storm, seat)}"

    return end


def _kill(storm: "Storm", seat: "Seat") -> str:
    assert seat.process is not None
    seat.process.kill()
    return f", back after {storm.restart_later(seat, 0.2):.1f} s"


def _tell_to_stop(storm: "Storm", seat: "Seat") -> str:
    assert seat.process is not None
    seat.process.tell_to_stop()
    return f", back {storm.restart_later(seat, 0.2):.1f} s after it has left"


LONG_KINDS = (
    FaultKind(
        "killed in long rollouts",
        "SIGKILL to a producer that is in the middle of rollouts of up to 2.4 s",
        3,
        _in_long_rollouts(_kill, "SIGKILL"),
    ),
    FaultKind(
        "told to stop in long rollouts",
        f"SIGTERM to one, which lets them go on for {GRACE_S:g} s only",
        2,
        _in_long_rollouts(_tell_to_stop, "SIGTERM"),
    ),
)
"""All that happens in a leg of long rollouts."""


KINDS = (
    FaultKind("producer killed", "SIGKILL; it comes back under its id or a new one", 6, _producer_kill),
    FaultKind(
        "producer told to stop", "SIGTERM; it must end with status 0, another takes its place", 3, _producer_term
    ),
    FaultKind(
        "producer frozen", "SIGSTOP for up to 3 s, three times what a claim lives unrefreshed", 4, _producer_freeze
    ),
    FaultKind("trainer killed", "SIGKILL; resumed from its checkpoint", 6, _trainer_kill),
    FaultKind("trainer told to stop", "SIGTERM; it must end with status 0, and is resumed", 2, _trainer_term),
    FaultKind("trainer frozen", "SIGSTOP for up to 3 s", 2, _trainer_freeze),
    FaultKind(
        "trainer replaced", "SIGSTOP, a second trainer resumes, the first wakes up and must end", 3, _trainer_replace
    ),
    FaultKind("Redis killed", "SIGKILL, back after up to 2 s", 4, _redis_kill),
    FaultKind("Redis loses power", "SIGKILL, and the unsynced end of its file is gone", 4, _redis_power_loss),
    FaultKind("machine loses power", "the same with every other process killed", 2, _machine_power_loss),
    FaultKind("Redis emptied", "SIGKILL, back without any data", 2, _redis_emptied),
    FaultKind("Redis frozen", "SIGSTOP for up to 2 s", 2, _redis_freeze),
    FaultKind("Redis full", "maxmemory at what is used, for up to 2 s", 3, _redis_full),
    FaultKind("connections cut", "every connection of one process at once", 4, _cut),
    FaultKind("command cut", "one command lost, or executed and its reply lost, wholly or in part", 8, _cut_command),
    FaultKind("chunk harmed", "a chunk of the weight log in Redis lost, flipped or cut short", 3, _chunk_harmed),
    FaultKind("anchors lost", "the hash of anchors deleted", 1, _anchors_lost),
    FaultKind("copy harmed", "the copy of the policy torn, without state, cut short, or removed", 3, _copy_harmed),
    FaultKind(
        "producer killed in a patch", "SIGKILL between two chunks of a host's copy", 2, _producer_killed_in_patch
    ),
    FaultKind("disk full", "no room in the checkpoint folder for up to 2.5 s", 3, _disk_full),
    FaultKind(
        "checkpoint spoiled",
        "a file of the newest torn, flipped or missing; the trainer killed",
        2,
        _checkpoint_corrupt,
    ),
)


RANK_KINDS = (
    FaultKind("rank killed in forward", "SIGKILL in the forward pass of an update", 1, _hit("forward", "killed")),
    FaultKind("rank killed in backward", "SIGKILL where the backward pass begins", 1, _hit("backward", "killed")),
    FaultKind("rank killed in the optimizer", "SIGKILL in the optimizer's step", 1, _hit("optimizer", "killed")),
    FaultKind("rank killed in a checkpoint", "SIGKILL when it has written its part", 1, _hit("checkpoint", "killed")),
    FaultKind("rank 1 frozen", "SIGSTOP in the forward pass, rank 0 waits for it", 1, _hit("forward", "frozen", 1)),
    FaultKind(
        "rank 0 frozen",
        "SIGSTOP between two updates, rank 1 waits for its orders",
        1,
        _hit("between steps", "frozen", 0),
    ),
)
"""Of a trainer of several ranks: each happens once in a leg with one."""


def schedule(leg: Leg, *, with_disk: bool = True) -> list[tuple[float, FaultKind, Random]]:
    """(seconds after the one before, kind, its draws) of each fault: equal legs give equal schedules.

    Raises:
        ValueError: `only` names no kind, or there are fewer faults than ranks can be hit in ways.
    """
    random = Random(leg.seed)
    possible = LONG_KINDS if leg.with_long else (*KINDS, *(RANK_KINDS if leg.with_ranks else ()))
    kinds = [kind for kind in possible if leg.only in (None, kind.name) and (with_disk or kind.harm is not _disk_full)]
    if not kinds:
        raise ValueError(f"only = {leg.only!r}: no such kind; expected one of {[kind.name for kind in possible]}")
    if leg.with_ranks and leg.only is None:  # the command refuses a server with so little memory
        kinds = [kind for kind in kinds if kind.harm is not _redis_full]
    weights = [kind.weight for kind in kinds]
    drawn = [
        (
            min(random.expovariate(1 / leg.mean_gap_s), 4 * leg.mean_gap_s),
            random.choices(kinds, weights)[0],
            Random(f"{leg.seed}:{number}"),
        )
        for number in range(leg.num_faults)
    ]
    if leg.with_ranks and leg.only is None:
        for number, kind in zip(random.sample(range(len(drawn)), len(RANK_KINDS)), RANK_KINDS, strict=True):
            drawn[number] = (drawn[number][0], kind, drawn[number][2])
    return drawn
