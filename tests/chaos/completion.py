"""The end of a leg: everything is repaired, the run must continue, and then finish."""

import heapq
import json
import math
from typing import TYPE_CHECKING

import msgspec

from tests.chaos.environment import Notes

if TYPE_CHECKING:
    from tests.chaos.supervisor import Supervisor

FEWEST_UPDATES = 30
"""The fewest updates of a leg: on a slow machine the faults may be over after a few."""


def complete_run(supervisor: "Supervisor") -> None:
    """Waits for each thing that must now happen by itself; what does not is a problem of the leg."""
    while supervisor.planned:
        heapq.heappop(supervisor.planned)[2]()
    if not supervisor.server.is_running:
        supervisor.server.start()
    supervisor.say(f"{supervisor.leg.name}: {len(supervisor.done)} faults done, waiting for the run to move and to end")
    if not supervisor.until(supervisor.server.answers, "Redis answers"):
        return
    supervisor.server.limit_memory(None)
    num_steps = supervisor.num_steps()
    if not supervisor.until(lambda: supervisor.num_steps() > num_steps + 3, "the trainer takes steps again"):
        return _stop_all(supervisor)
    supervisor.until(lambda: not supervisor.former, "replaced trainers have ended")
    _finish(supervisor)


def _finish(supervisor: "Supervisor") -> None:
    """Sets the number of updates to a few more than were done, so that the run finishes by itself."""
    supervisor.is_ending = True
    for slot in supervisor.trainers:
        if slot.process is not None:
            slot.process.tell_to_stop()
    if not supervisor.until(lambda: supervisor.have_ended(supervisor.trainers), "the trainer stops"):
        return _stop_all(supervisor)
    # After a deep rollback far more is released than was trained: every index must be used.
    num_updates = json.loads((supervisor.run_folder / "trainer.json").read_text())["num_updates"]
    num_updates = max(num_updates, math.ceil(Notes(supervisor.notes).last_index / supervisor.config.groups_per_batch))
    num_updates = max(num_updates + supervisor.config.max_lag + 5, FEWEST_UPDATES)
    supervisor.config = msgspec.structs.replace(supervisor.config, num_updates=num_updates)
    supervisor.trainers = supervisor.trainers[:1]
    for slot in [*supervisor.trainers, *supervisor.producers]:
        if slot.process is None:
            supervisor.start(slot)
    if not supervisor.until(lambda: supervisor.have_ended(supervisor.trainers), "the run ends"):
        return _stop_all(supervisor)
    supervisor.until(lambda: supervisor.have_ended(supervisor.producers), "the producers leave")
    supervisor.until(lambda: not supervisor.have_left_others(), "killed trainers leave nobody behind")


def _stop_all(supervisor: "Supervisor") -> None:
    """Stops a run that does not finish, so that its state so far is committed and judged."""
    supervisor.is_ending = True
    for slot in supervisor.slots:
        if slot.process is not None:
            slot.process.tell_to_stop()
    supervisor.until(lambda: supervisor.have_ended(supervisor.slots), "every process stops")
