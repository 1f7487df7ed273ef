"""The kinds of faults. Each injects the fault, arranges the repair that an operator would make, and describes what it
did."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Literal

from cutting_proxy import When
from tests.chaos.aim import Fate, Place
from tests.chaos.leg import Leg
from tests.chaos.proxy import PRODUCER_COMMANDS, TRAINER_COMMANDS

if TYPE_CHECKING:
    from tests.chaos.supervisor import Slot, Supervisor


@dataclass(frozen=True)
class FaultKind:
    """One kind of fault.

    inject: injects it, with random draws of its own, and returns a description; None if it is impossible at this moment
    or not complete yet.
    weight: how often it is drawn, relative to the others.
    """

    name: str
    about: str
    weight: int
    inject: Callable[["Supervisor", Random], str | None]


def _producer_kill(supervisor: "Supervisor", draw: Random) -> str | None:
    slot = supervisor.producer(draw)
    if slot.process is None:
        return None
    renamed = draw.random() < 0.4
    slot.process.kill()
    delay_s = supervisor.restart_later(slot, draw.uniform(0.0, 1.5))
    if renamed:
        supervisor.rename(slot)
    return f"{slot.was}, back after {delay_s:.1f} s as {slot.name}"


Choice = Literal["producer", "trainer"]
"""The method of `Supervisor` that chooses a slot."""


def _term(role: Choice) -> Callable[["Supervisor", Random], str | None]:
    def tell_to_stop(supervisor: "Supervisor", draw: Random) -> str | None:
        slot: Slot = getattr(supervisor, role)(draw)
        if slot.process is None or slot.process.is_stopped:
            return None
        slot.process.tell_to_stop()
        return f"{slot.name}, the next one {supervisor.restart_later(slot, draw.uniform(0.0, 1.0)):.1f} s after its end"

    return tell_to_stop


def _freeze(role: Choice) -> Callable[["Supervisor", Random], str | None]:
    def freeze(supervisor: "Supervisor", draw: Random) -> str | None:
        slot: Slot = getattr(supervisor, role)(draw)
        process = slot.process
        if process is None or process.is_stopped:
            return None
        seconds = draw.uniform(0.1, 3.0)
        process.freeze()
        supervisor.later(seconds, process.thaw)
        return f"{slot.name} for {seconds:.1f} s"

    return freeze


def _trainer_kill(supervisor: "Supervisor", draw: Random) -> str | None:
    slot = supervisor.trainer(draw)
    if slot.process is None:
        return None
    slot.process.kill()
    return f"{slot.name}, {supervisor.succession} after {supervisor.restart_later(slot, draw.uniform(0.0, 1.0)):.1f} s"


def _trainer_replace(supervisor: "Supervisor", draw: Random) -> str | None:
    slot = supervisor.trainer(draw)
    process = slot.process
    if process is None or process.is_stopped or process.was_told_to_stop:
        return None
    process.freeze()
    if len(supervisor.trainers) > 1:
        # The other one waits until the lease has expired, and for as long again.
        seconds = draw.uniform(2.0, 5.0)
        supervisor.later(seconds, process.thaw)
        return f"{slot.name} frozen for {seconds:.1f} s, the other takes over"
    seconds = draw.uniform(0.5, 3.0)
    supervisor.detach(slot)
    supervisor.later(seconds, process.thaw)
    return f"{slot.name} frozen, a second one resumes at once, the first wakes after {seconds:.1f} s"


def _redis_kill(supervisor: "Supervisor", draw: Random) -> str | None:
    if not supervisor.server.is_running:
        return None
    supervisor.server.stop()
    return f"back after {supervisor.redis_later(draw.uniform(0.0, 2.0)):.1f} s"


def _redis_power_loss(supervisor: "Supervisor", draw: Random) -> str | None:
    if not supervisor.server.is_running:
        return None
    lost = supervisor.server.lose_power(draw)
    return f"{lost}; back after {supervisor.redis_later(draw.uniform(0.0, 1.0)):.1f} s"


def _machine_power_loss(supervisor: "Supervisor", draw: Random) -> str | None:
    if not supervisor.server.is_running:
        return None
    for slot in supervisor.slots:
        if slot.process is not None:
            (slot.process.destroy if slot in supervisor.trainers else slot.process.kill)()  # its ranks with it
            supervisor.restart_later(slot, draw.uniform(0.2, 1.0))
    lost = supervisor.server.lose_power(draw)
    return f"every process killed; {lost}; back after {supervisor.redis_later(draw.uniform(0.0, 0.3)):.1f} s"


def _redis_emptied(supervisor: "Supervisor", draw: Random) -> str | None:
    if not supervisor.server.is_running:
        return None
    supervisor.server.empty()
    return f"back with nothing after {supervisor.redis_later(draw.uniform(0.0, 1.0)):.1f} s"


def _redis_freeze(supervisor: "Supervisor", draw: Random) -> str | None:
    if not supervisor.server.is_running or supervisor.server.is_stopped:
        return None
    seconds = draw.uniform(0.1, 2.0)
    process = supervisor.server.process
    supervisor.server.freeze()
    supervisor.later(seconds, lambda: supervisor.server.thaw() if supervisor.server.process is process else None)
    return f"for {seconds:.1f} s"


def _redis_full(supervisor: "Supervisor", draw: Random) -> str | None:
    if not supervisor.server.answers():
        return None
    room, seconds = draw.randrange(0, 200_000), draw.uniform(0.3, 2.0)
    supervisor.server.limit_memory(room)
    supervisor.later(seconds, lambda: supervisor.server.limit_memory(None) if supervisor.server.answers() else None)
    return f"{room:,} bytes below its limit for {seconds:.1f} s"


def _cut(supervisor: "Supervisor", draw: Random) -> str | None:
    slot, seconds = supervisor.any_slot(draw), draw.choice([0.0, draw.uniform(0.1, 3.0)])
    supervisor.proxy.cut(slot.socket, seconds)
    return f"every connection of {slot.name}, and new ones refused for {seconds:.1f} s"


def _cut_command(supervisor: "Supervisor", draw: Random) -> str | None:
    slot = supervisor.any_slot(draw)
    command = draw.choice(TRAINER_COMMANDS if slot in supervisor.trainers else PRODUCER_COMMANDS)
    when: When = draw.choice(["before", "reply", "reply", "within"])
    nth = draw.randrange(1, 6)
    supervisor.proxy.cut_command(slot.socket, command, nth, when)
    how = {"before": "before it is sent", "reply": "before its reply", "within": "within its reply"}[when]
    return f"{slot.name} loses its connection at {command} number {nth} from here on, {how}"


def _disk_full(supervisor: "Supervisor", draw: Random) -> str | None:
    assert supervisor.disk is not None
    room, seconds = draw.randrange(0, 400_000), draw.uniform(0.3, 2.5)
    supervisor.disk.fill(room)
    supervisor.later(seconds, supervisor.disk.drain)
    return f"{room:,} bytes left for {seconds:.1f} s"


def _checkpoint_corrupt(supervisor: "Supervisor", draw: Random) -> str | None:
    """Corrupts the newest checkpoint if a whole one precedes it: otherwise the policy would be lost, which no protocol
    prevents."""
    slots = [slot for slot in supervisor.trainers if slot.process is not None]
    if not slots:
        return None
    for slot in slots:
        assert slot.process is not None
        slot.process.destroy()
        delay_s = supervisor.restart_later(slot, draw.uniform(0.0, 0.5))
    whole = supervisor.whole_checkpoints()
    if len(whole) < 2:
        return f"no other is whole: only the trainer is killed, back after {delay_s:.1f} s"
    newest = whole[-1]
    file = draw.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
    how = draw.choice(["torn", "flipped", "missing"])
    if how == "torn":
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        flipped = bytearray(file.read_bytes())
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
        file.write_bytes(flipped)
    else:
        file.unlink()
    supervisor.corrupted.add(newest.name)
    return f"{file.relative_to(newest)} of the newest is {how}, the trainer killed, back after {delay_s:.1f} s"


def _chunk_corrupt(supervisor: "Supervisor", draw: Random) -> str | None:
    """Corrupts a chunk of the newest policy, which no producer may hold yet, or any other."""
    if not supervisor.server.answers():
        return None
    client, name = supervisor.server.client, supervisor.keys.chunks
    found: Any = client.hkeys(name)
    if not found:
        return None
    newest = max(int(key.partition(b"-")[0]) for key in found)
    recent = [key for key in sorted(found) if int(key.partition(b"-")[0]) == newest]
    key = draw.choice(recent if draw.random() < 0.7 else sorted(found))
    data: Any = client.hget(name, key)
    how = draw.choice(["lost", "flipped", "cut short"])
    if data is None:
        return None
    if how == "lost":
        client.hdel(name, key)
    else:
        at = draw.randrange(len(data))
        flipped = data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        client.hset(name, key, data[:at] if how == "cut short" else flipped)
    return f"{key.decode()} is {how}"


def _hit(place: Place, fate: Fate, rank: int | None = None) -> Callable[["Supervisor", Random], str | None]:
    def inject(supervisor: "Supervisor", draw: Random) -> str | None:
        assert supervisor.hits is not None
        return supervisor.hits.hit(place, fate, rank, draw)

    return inject


KINDS = (
    FaultKind("producer killed", "SIGKILL; it comes back under its id or a new one", 6, _producer_kill),
    FaultKind(
        "producer told to stop", "SIGTERM; it must end with status 0, another takes its place", 3, _term("producer")
    ),
    FaultKind(
        "producer frozen", "SIGSTOP for up to 3 s, three times what a claim lives unrefreshed", 4, _freeze("producer")
    ),
    FaultKind("trainer killed", "SIGKILL; resumed from its checkpoint", 6, _trainer_kill),
    FaultKind("trainer told to stop", "SIGTERM; it must end with status 0, and is resumed", 2, _term("trainer")),
    FaultKind("trainer frozen", "SIGSTOP for up to 3 s", 2, _freeze("trainer")),
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
    FaultKind("chunk corrupted", "a chunk of the weight log in Redis lost, flipped or cut short", 3, _chunk_corrupt),
    FaultKind("disk full", "no room in the checkpoint folder for up to 2.5 s", 3, _disk_full),
    FaultKind(
        "checkpoint corrupted",
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
"""The faults of a trainer of several ranks: each happens once in a leg with one."""


def schedule(leg: Leg, *, with_disk: bool = True) -> list[tuple[float, FaultKind, Random]]:
    """Returns (seconds after the fault before, kind, its random draws) of each fault; equal legs give equal schedules.

    Raises:
        ValueError: `only` names no kind, or there are fewer faults than kinds for ranks.
    """
    random = Random(leg.seed)
    possible = (*KINDS, *(RANK_KINDS if leg.with_ranks else ()))
    kinds = [
        kind for kind in possible if leg.only in (None, kind.name) and (with_disk or kind.inject is not _disk_full)
    ]
    if not kinds:
        raise ValueError(f"only = {leg.only!r}: no such kind; expected one of {[kind.name for kind in possible]}")
    if leg.with_ranks and leg.only is None:  # the trainer refuses a server with so little memory
        kinds = [kind for kind in kinds if kind.inject is not _redis_full]
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
