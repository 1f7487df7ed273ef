"""What ends a run for good."""


class RunFailedError(RuntimeError):
    """The run cannot go on; the message says why."""
