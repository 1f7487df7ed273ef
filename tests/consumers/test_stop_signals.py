"""Stop signals: a stop that is swallowed is carried out, and afterwards signals are ignored."""

import os
import signal
import sys
import time

import pytest

from penstock.consumers.stop_signals import StoppedError, StopSignals


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch):
    """Handlers and the hook are restored."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("in_this_process")
def test_a_stop_that_a_library_swallows_is_carried_out_before_training():
    stop_signals = StopSignals()
    with pytest.raises(StoppedError):
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # the second one leaves in peace what the first is ending
    calls = []
    with pytest.raises(StoppedError):
        stop_signals.hand_to(lambda: calls.append("stop"))


@pytest.mark.usefixtures("in_this_process")
def test_a_signal_goes_where_the_signals_were_handed_to_and_is_ignored_at_the_end():
    stop_signals, calls = StopSignals(), []
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
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)  # the handler runs


@pytest.mark.usefixtures("in_this_process")
def test_a_stop_in_a_finalizer_comes_again_and_nothing_is_printed(monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    StopSignals()
    with pytest.raises(StoppedError):
        finalized = Finalized()
        del finalized
        time.sleep(20)
    assert not printed


@pytest.mark.usefixtures("in_this_process")
def test_other_exceptions_in_a_finalizer_are_printed(monkeypatch):
    class Broken:
        def __del__(self) -> None:
            raise ValueError("broken")

    printed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: printed.append(args.exc_value))
    StopSignals()
    broken = Broken()
    del broken
    assert [str(error) for error in printed] == ["broken"]
