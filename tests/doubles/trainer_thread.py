"""A trainer in a thread of its own, for tests that do something meanwhile."""

import threading

from penstock.consumers.trainer import Trainer


class TrainerThread(threading.Thread):
    """`outcome` is what `run` returned or raised; None while it runs."""

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
