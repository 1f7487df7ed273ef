"""Stop signals: a stop that is swallowed is carried out, and afterwards signals are ignored."""

import os
import signal
import sys
import time

import pytest

from penstock.consumers.stop_signals import StoppedError, StopSignals


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch):
    """Handlers and the hook are restored. None is ignored at first, as SIGHUP is under `nohup`."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("in_this_process")
def test_a_swallowed_stop_is_carried_out_before_training_and_later_ones_go_where_they_are_handed_to():
    stop_signals, calls = StopSignals(), []
    with pytest.raises(StoppedError):
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # the second one leaves in peace what the first is ending
    with pytest.raises(StoppedError):
        stop_signals.hand_to(lambda: calls.append("stop"))
    stop_signals = StopSignals()
    stop_signals.hand_to(lambda: calls.append("stop"))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(os.getpid(), number)
    assert calls == ["stop"] * 3
    stop_signals.ignore()
    os.kill(os.getpid(), signal.SIGTERM)
    assert calls == ["stop"] * 3
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under `nohup`
    StopSignals()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


class Finalized:
    def __init__(self, end) -> None:
        self.end = end

    def __del__(self) -> None:
        self.end()


@pytest.mark.usefixtures("in_this_process")
def test_a_stop_in_a_finalizer_comes_again_and_nothing_is_printed_but_other_exceptions(monkeypatch):
    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)  # the handler runs

    def fail() -> None:
        raise ValueError("broken")

    printed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: printed.append(str(args.exc_value)))
    StopSignals()
    for end in (stop, fail):
        finalized = Finalized(end)
        if end is fail:
            del finalized
            continue
        with pytest.raises(StoppedError):
            del finalized
            time.sleep(20)
        assert not printed
    assert printed == ["broken"]
