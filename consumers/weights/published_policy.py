"""Version numbers of the published policies."""

from penstock.consumers.learning.batch.lag import LagTable
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.weights.publisher import Publisher
from penstock.schemas.policy import make_version


class PublishedPolicy:
    """Numbers the learner's policies within an epoch, by the optimizer steps taken in it.

    lag_of: advanced by each publication. parent_version: the version that the epoch's first policy equals.
    """

    def __init__(
        self, publisher: Publisher, learner: Learner, lag_of: LagTable, epoch: int, parent_version: int
    ) -> None:
        self._publisher = publisher
        self._learner = learner
        self._lag_of = lag_of
        self._epoch = epoch
        self._parent_version = parent_version
        self._steps_before = self._num_steps

    @property
    def _num_steps(self) -> int:
        return self._learner.num_steps + self._learner.num_warm_steps

    @property
    def version(self) -> int:
        return self._lag_of.current

    def publish_first(self) -> None:
        """Publishes the weights that the epoch begins with, those after a warm start; after a resume they are a fork of
        the parent version."""
        self._publisher.publish(self.version, self._parent_version, fork=self._epoch > 0)

    def advance(self) -> None:
        """Numbers the weights after optimizer steps, as `version`."""
        self._lag_of.advance(make_version(self._epoch, self._num_steps - self._steps_before))

    def publish(self) -> None:
        """Begins to publish the weights after an update under the next version, which becomes `version`.

        Waits for the previous version to be announced.

        Raises:
            OSError, RedisGoneError, FencedError: the previous version was not announced; see `Publisher.wait`.
        """
        self._publisher.wait()
        parent_version = self.version
        self.advance()
        self._publisher.publish(self.version, parent_version)
