"""An evaluation as a person is shown it: progress on stderr, what else is printed in a file."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.deploy.launch.command_line import DEFAULT_RUNS, limit_threads
from penstock.deploy.launch.engine_output import output_in, progress
from penstock.producers.interfaces import EngineError
from penstock.schemas.config import RunConfig

if TYPE_CHECKING:
    from penstock.deploy.evaluate.evaluation import Evaluated


def evaluate_aside(model: str | Path, settings: RunConfig, *, runs: str | Path = DEFAULT_RUNS) -> "Evaluated":
    """See `penstock.deploy.running.evaluate`, also for what it raises."""
    limit_threads(settings.producers.num_threads)
    from penstock.deploy.evaluate.evaluation import evaluate as evaluate_model  # imports torch

    say = progress(True)
    log = Path(tempfile.mkstemp(prefix="penstock-evaluate-", suffix=".log")[1])
    is_wanted = False
    try:
        with output_in(log):
            found = evaluate_model(model, settings, runs=runs, say=say)
        is_wanted = bool(found.failures)
    except EngineError as error:
        is_wanted = True
        raise EngineError(f"{error} ({log} holds what the engine printed)") from error
    finally:
        if not is_wanted:
            log.unlink()
    for reason, count in found.failures.items():
        say(f"{count} of {sum(each.num_prompts for each in found.sets)} prompts failed, each counts as 0: {reason}")
    if found.failures:
        say(f"{log} has more")
    return found
