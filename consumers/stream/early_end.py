"""The end of a run before its last update, by what evaluations show."""

import logging

from penstock.consumers.stream.evaluation import EvaluationResult
from penstock.consumers.stream.run_progress import RunProgress
from penstock.schemas.config import RunConfig
from penstock.schemas.figures import figure_in

log = logging.getLogger(__name__)


class EarlyEnd:
    """Ends a run at its goal (`evaluation.stop_at_goal`), or once `evaluation.patience` evaluations in a row have shown
    no better value than one before them.

    reason: why the run ends, empty while it goes on.
    """

    def __init__(self, config: RunConfig, progress: RunProgress) -> None:
        self.reason = ""
        self._config = config
        self._progress = progress

    def consider(self, result: EvaluationResult) -> None:
        evaluation, progress = self._config.evaluation, self._progress
        goal, patience, found = evaluation.goal, evaluation.patience, ""
        if goal is not None and evaluation.stop_at_goal:
            reached = result.figures.get(goal.figure)
            if reached is not None and reached >= goal.value:
                found = f"held-out {goal.figure} {reached:.4f} has reached the goal of {goal.value:g}"
        figure = self._config.checkpoint.best or evaluation.figure
        value = figure_in(figure, result.figures, result.environments)
        if patience is not None and value is not None:
            progress.best = progress.best.after(figure, value, result.update)
            if progress.best.num_since >= patience:
                best = progress.best.value
                found = found or f"{patience} evaluations in a row have held-out {figure} no better than {best:.4f}"
        if found and not self.reason:
            self.reason = found
            log.info("the run ends before its last update: %s", found)
