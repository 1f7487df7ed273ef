"""Logging of a process to standard error: JSON lines for machines, or short lines for people.

A record has `time` (UTC), `level`, `run`, `role`, `id`, `policy_version` (if any), `logger`, `message` and,
for an exception, `traceback`. JSON is the default unless standard error is a terminal; PENSTOCK_LOG = "json" or "text"
overrides it. Records of libraries are written in the same way.
"""

import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TextIO

from penstock.schemas.config import ConfigError
from penstock.schemas.policy import split_version
from penstock.schemas.rollout import shown_traceback

FORM = "PENSTOCK_LOG"
_HANDED_DOWN = "PENSTOCK_LOG_HANDED_DOWN"
"""Environment variable with the producer's settings, for the processes that its engine starts."""
_CHATTY = ("httpx", "httpcore", "openai")
"""Libraries that log every request at INFO, with its full URL."""
_LINE_BREAKS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
"""Characters that JSON does not escape and some readers treat as line breaks."""
_ORDER = ("time", "level", "run", "role", "id", "policy_version", "logger", "message", "traceback")

log = logging.getLogger(__name__)


class LogHandler(logging.Handler):
    """Writes to the current standard error.

    fields: added to every record. A callable is called for each record; None, or a callable that raises, is left out.
    """

    def __init__(self, form: str, fields: Mapping[str, Any]) -> None:
        super().__init__()
        self.form = form
        self.fields = dict(fields)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            event = self._event(record)
            line = _as_json(event) if self.form == "json" else as_text(event)
            stream: TextIO = sys.stderr
            stream.write(line + "\n")
            stream.flush()
        except Exception:
            pass  # standard error cannot be written, and there is nowhere else to log

    def _event(self, record: logging.LogRecord) -> dict[str, Any]:
        seconds, milliseconds = divmod(int(record.created * 1000), 1000)
        event = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{milliseconds:03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
        }
        if record.exc_info and record.exc_info[0] is not None:
            event["traceback"] = shown_traceback(record.exc_info[1]).rstrip("\n")
        event |= {name: found for name, value in self.fields.items() if (found := _value(value)) is not None}
        return {name: event[name] for name in (*_ORDER, *sorted(event.keys() - set(_ORDER))) if name in event}


def configure(role: str, *, run: str, id: str) -> None:
    """Routes this process' records from INFO up, uncaught exceptions and warnings through one handler. A fatal signal,
    as in a library of the user's code, leaves the frames of its threads on stderr.

    Raises:
        ConfigError: PENSTOCK_LOG is neither "json" nor "text".
    """
    form = os.environ.get(FORM) or ("text" if sys.stderr.isatty() else "json")
    if form not in ("json", "text"):
        raise ConfigError(f"{FORM} = {form!r}: expected 'json' or 'text'")
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, LogHandler)]:
        root.removeHandler(handler)
    root.addHandler(LogHandler(form, {"run": run, "role": role, "id": id}))
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for library in map(logging.getLogger, _CHATTY):
        if library.level == logging.NOTSET:
            library.setLevel(logging.WARNING)
    faulthandler.enable(2)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread
    adopt()


def bind(**fields: Any | Callable[[], Any]) -> None:
    """Adds fields to every later record; see `LogHandler`. Without `configure` it does nothing."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogHandler):
            handler.fields.update(fields)


def adopt() -> None:
    """Routes the loggers of libraries through the handler of `configure`: removes their handlers and keeps their
    levels; silenced loggers remain silent. Call it after importing a library that configures logging itself. Without
    `configure` it does nothing."""
    if not any(isinstance(handler, LogHandler) for handler in logging.getLogger().handlers):
        return
    for name in list(logging.Logger.manager.loggerDict):
        logger = logging.Logger.manager.loggerDict[name]
        if isinstance(logger, logging.Logger) and (logger.handlers or not logger.propagate):
            if not logger.propagate and all(isinstance(each, logging.NullHandler) for each in logger.handlers):
                continue  # deliberately silent
            for handler in list(logger.handlers):
                logger.removeHandler(handler)
            logger.propagate = True


def hand_down(*libraries: str) -> None:
    """Passes form, fields and the levels of `libraries` to processes started later, which call `inherit`."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogHandler):
            fields = {name: value for name, value in handler.fields.items() if isinstance(value, str)}
            levels = {name: logging.getLogger(name).level for name in libraries}
            os.environ[FORM], os.environ[_HANDED_DOWN] = handler.form, json.dumps({"fields": fields, "levels": levels})


def inherit(role: str) -> None:
    """Calls `configure` in a process whose parent has called `hand_down`; otherwise does nothing."""
    if os.environ.get(_HANDED_DOWN):
        handed_down = json.loads(os.environ[_HANDED_DOWN])
        configure(role, run=handed_down["fields"]["run"], id=handed_down["fields"]["id"])
        for name, level in handed_down["levels"].items():
            logging.getLogger(name).setLevel(level)


def as_text(event: Mapping[str, Any]) -> str:
    """Formats as `2026-11-21 20:34:16.123 WARNING producer-0 v3:21 message`; further lines are indented."""
    who = event.get("id") if event.get("role") == "producer" else event.get("role")
    version = event.get("policy_version")
    words = [str(event["time"]).replace("T", " ").rstrip("Z"), str(event["level"]), str(who or event.get("logger"))]
    if isinstance(version, int) and version >= 0:
        epoch, steps = split_version(version)
        words.append(f"v{epoch}:{steps}" if epoch else f"v{steps}")
    lines = [*str(event["message"]).splitlines(), *str(event.get("traceback", "")).splitlines()]
    return "\n    ".join([" ".join([*words, *map(_printable, lines[:1])]), *map(_printable, lines[1:])])


def line_as_text(line: str) -> str:
    """Converts a JSON record in a line of a log to text; returns any other line unchanged."""
    if not line.startswith('{"time"'):
        return line
    try:
        return as_text(json.loads(line))
    except (ValueError, KeyError, TypeError):
        return line


def _as_json(event: Mapping[str, Any]) -> str:
    line = json.dumps(event, ensure_ascii=False)
    # A surrogate cannot be encoded; its backslash escape is valid JSON.
    return line.translate(_LINE_BREAKS).encode(errors="backslashreplace").decode()


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception as error:
        return f"{_shown(record.msg)} with {_shown(record.args)}: {type(error).__name__}: {_shown(error)}"


def _shown(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__} that cannot be shown: {type(error).__name__}>"


def _printable(line: str) -> str:
    """Escapes control characters: a message may quote foreign text, which must not control the terminal."""
    line = line.expandtabs(4)
    return line if line.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def _value(value: Any) -> Any:
    if not callable(value):
        return value
    try:
        return value()
    except Exception:
        return None


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    log.critical("%s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def _log_uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_value is None or issubclass(arguments.exc_type, SystemExit):
        return
    where = arguments.thread.name if arguments.thread is not None else "a thread"
    trace = (arguments.exc_type, arguments.exc_value, arguments.exc_traceback)
    log.critical("%s: %s: %s", where, arguments.exc_type.__name__, arguments.exc_value, exc_info=trace)
