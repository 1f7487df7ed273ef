"""The signals that stop a process of a run in order."""

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns SIGINT, SIGTERM and, when a terminal is closed, SIGHUP; without the last where it is ignored, as
    under `nohup`."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return (signal.SIGINT, signal.SIGTERM)
    return (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
