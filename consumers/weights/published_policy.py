"""The newest published policy: its version, and the publication of the next one."""

from penstock.consumers.learning.lag import LagTable
from penstock.consumers.learning.learner import Learner
from penstock.consumers.weights.publisher import Publisher
from penstock.schemas.policy import make_version


class PublishedPolicy:
    """Numbers the learner's policies within an epoch, by the optimizer steps taken in it.

    lag_of: moves on with each publication. parent_version: the version that the epoch's first policy equals.
    """

    def __init__(
        self, publisher: Publisher, learner: Learner, lag_of: LagTable, epoch: int, parent_version: int
    ) -> None:
        self._publisher = publisher
        self._learner = learner
        self._lag_of = lag_of
        self._epoch = epoch
        self._parent_version = parent_version
        self._steps_before = learner.num_steps

    @property
    def version(self) -> int:
        return self._lag_of.current

    def publish_first(self) -> None:
        """Publishes the weights that the epoch begins with; after a resume they are a fork of the parent version."""
        self._publish(self._parent_version, fork=self._epoch > 0)

    def publish(self) -> None:
        """Publishes the weights after an update under the next version, which from now on is this one.

        Waits for the version before to be announced; the announcement of this one follows.

        Raises:
            OSError, RedisGoneError, FencedError: the version before was not announced; see `Publisher.wait`.
        """
        self._publisher.wait()
        parent_version = self.version
        self._lag_of.advance(make_version(self._epoch, self._learner.num_steps - self._steps_before))
        self._publish(parent_version, fork=False)

    def check(self) -> None:
        """Raises what has ended a publication; see `Publisher.wait`."""
        self._publisher.check()

    def wait(self) -> None:
        """Returns once the newest version is announced; see `Publisher.wait`."""
        self._publisher.wait()

    def take_blocked_s(self) -> float:
        """The seconds that the training has waited for publications since the last call."""
        return self._publisher.take_blocked_s()

    def end(self) -> None:
        self._publisher.end()

    def _publish(self, parent_version: int, *, fork: bool) -> None:
        self._publisher.publish(self.version, parent_version, fork=fork)
