"""Runs a trainer in a thread, for tests that act during the run."""

import threading

from penstock.consumers.trainer import Trainer


class TrainerThread(threading.Thread):
    """A running trainer. outcome: what `run` returned or raised; None while it runs."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(daemon=True)
        self._trainer = trainer
        self.outcome: bool | BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._trainer.run()
        except BaseException as error:
            self.outcome = error
