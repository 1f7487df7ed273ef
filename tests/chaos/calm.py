"""After the faults: everything is repaired, the run must move again, and then come to its end."""

import heapq
import json
import math
from typing import TYPE_CHECKING

import msgspec

from tests.chaos.environment import Notes

if TYPE_CHECKING:
    from tests.chaos.storm import Storm

ENGINE_BOOT_S = 240.0
FEWEST_UPDATES = 30
"""Of a whole leg: on a slow machine the faults may be over after a few."""


def end(storm: "Storm") -> None:
    """Waits for each thing that must happen by itself now; what does not is a problem of the storm's."""
    while storm.planned:
        heapq.heappop(storm.planned)[2]()
    if not storm.server.is_running:
        storm.server.start()
    storm.say(f"{storm.leg.name}: {len(storm.done)} faults done, waiting for the run to move and to end")
    if not storm.until(storm.server.answers, "Redis answers"):
        return
    storm.server.limit_memory(None)
    num_steps = storm.num_steps()
    if not storm.until(lambda: storm.num_steps() > num_steps + 3, "the trainer takes steps again"):
        return _stop_all(storm)
    storm.until(lambda: not storm.former, "replaced trainers have ended")
    if storm.leg.with_vllm:
        storm.until(storm.engine_serves, "the real engine serves again", ENGINE_BOOT_S)
    _finish(storm)


def _finish(storm: "Storm") -> None:
    """Sets the number of updates to a few more than were done, so that the run ends by itself."""
    storm.is_calm = True
    for seat in storm.trainers:
        if seat.process is not None:
            seat.process.tell_to_stop()
    if not storm.until(lambda: storm.have_ended(storm.trainers), "the trainer stops"):
        return _stop_all(storm)
    # After a deep rollback far more is released than was trained: every index shall be used.
    num_updates = json.loads((storm.run_folder / "trainer.json").read_text())["num_updates"]
    num_updates = max(num_updates, math.ceil(Notes(storm.notes).last_index / storm.config.groups_per_batch))
    num_updates = max(num_updates + storm.config.max_lag + 5, FEWEST_UPDATES)
    storm.config = msgspec.structs.replace(storm.config, num_updates=num_updates)
    storm.trainers = storm.trainers[:1]
    for seat in [*storm.trainers, *storm.producers]:
        if seat.process is None:
            storm.start(seat)
    if not storm.until(lambda: storm.have_ended(storm.trainers), "the run ends"):
        return _stop_all(storm)
    storm.until(lambda: storm.have_ended(storm.producers), "the producers leave")
    storm.until(lambda: not storm.have_left_others(), "killed trainers and producers leave nobody behind")


def _stop_all(storm: "Storm") -> None:
    """For a run that does not end: what it has got so far is committed and judged."""
    storm.is_calm = True
    for seat in storm.seats:
        if seat.process is not None:
            seat.process.tell_to_stop()
    storm.until(lambda: storm.have_ended(storm.seats), "every process stops")
