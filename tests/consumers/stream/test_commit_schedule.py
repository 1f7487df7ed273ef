"""When a checkpoint that could not be written is tried again."""

from penstock.consumers.checkpoints.schedule import CommitSchedule


class StoppedClock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def schedule(clock: StoppedClock) -> CommitSchedule:
    # Every fourth update; memory is never asked for: in these tests nothing was settled since the last commit.
    commits = CommitSchedule(lambda: 0.0, 4, clock)
    commits.committed(0, 0, took_s=1.0)
    return commits


def test_the_time_to_the_next_try_begins_at_a_second_and_doubles_up_to_thirty():
    commits = schedule(StoppedClock())
    assert [commits.failed() for _ in range(8)] == [1, 2, 4, 8, 16, 30, 30, 30]


def test_nothing_is_due_before_that_time_and_a_checkpoint_is_once_it_is_over():
    clock = StoppedClock()
    commits = schedule(clock)
    assert commits.is_due(4, 0, busy=True)
    for _ in range(7):
        delay_s = commits.failed()
        clock.now += 0.75 * delay_s
        assert not commits.is_due(8, 0, busy=True), "not even the checkpoint of a later update"
        assert not commits.is_due(8, 0, busy=False)
        clock.now += 0.25 * delay_s
        assert commits.is_due(9, 0, busy=True)
        assert commits.is_due(9, 0, busy=False)


def test_after_a_commit_the_tries_begin_anew():
    commits = schedule(StoppedClock())
    for _ in range(5):
        commits.failed()
    commits.committed(9, 0, took_s=1.0)
    assert not commits.is_due(9, 0, busy=True)
    assert commits.is_due(12, 0, busy=True)
    assert [commits.failed(), commits.failed()] == [1, 2]
