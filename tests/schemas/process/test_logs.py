"""Records of a process: JSON lines for machines, short lines for a person, libraries' own included."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.schemas.config import ConfigError
from penstock.schemas.policy import make_version
from penstock.schemas.process import logs

ROOT = Path(__file__).parents[3]
CHATTY = ("httpx", "httpcore", "openai")


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves no handler, hook or level of this file to other tests."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr("threading.excepthook", __import__("threading").excepthook)
    monkeypatch.setenv(logs.FORM, "json")
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    levels = {name: logging.getLogger(name).level for name in CHATTY}
    yield
    root.setLevel(level)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)
    root.handlers[:] = handlers
    logging.captureWarnings(False)


def records(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=60)


def test_a_record_is_one_line_of_json_with_run_role_id_and_policy_version(capsys):
    logs.configure("producer", run="demo", id="producer-0")
    logs.bind(policy_version=lambda: 7)
    logging.getLogger("penstock.producers.loop").warning("two lines:\n%s", "é")
    (record,) = records(capsys)
    assert record.pop("time").endswith("Z")
    assert record == {
        "level": "WARNING",
        "run": "demo",
        "role": "producer",
        "id": "producer-0",
        "policy_version": 7,
        "logger": "penstock.producers.loop",
        "message": "two lines:\né",
    }
    logs.bind(policy_version=lambda: 1 / 0)
    logging.getLogger("x").warning("m")
    (record,) = records(capsys)
    assert "policy_version" not in record and record["message"] == "m"


class Unshowable:
    def __str__(self) -> str:
        raise RuntimeError("not me")

    __repr__ = __str__


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_message_that_cannot_be_formatted_is_one_record_all_the_same(capsys, monkeypatch, form):
    monkeypatch.setenv(logs.FORM, form)
    logs.configure("trainer", run="r", id="t")
    (handler,) = (each for each in logging.getLogger().handlers if isinstance(each, logs.LogHandler))
    for message, arguments, said in [
        ("%d groups", ("many",), "%d groups with ('many',): TypeError"),
        ("%s and %s", ("one",), "%s and %s with ('one',): TypeError"),
        ("%s", (Unshowable(),), "%s with <tuple that cannot be shown: RuntimeError>: RuntimeError: not me"),
        (Unshowable(), (), "<Unshowable that cannot be shown: RuntimeError>"),
    ]:
        handler.handle(logging.LogRecord("x", logging.WARNING, "x.py", 1, message, arguments, None))  # not to pytest's
        (line,) = capsys.readouterr().err.splitlines()
        assert said in (json.loads(line)["message"] if form == "json" else line)


def test_a_record_is_one_line_for_every_reader(capsys):
    said = "a\u2028b\u2029c\x85d\ne\x0bf\x1cg\udc80é"
    logs.configure("trainer", run="r", id="t")
    (handler,) = (one for one in logging.getLogger().handlers if isinstance(one, logs.LogHandler))
    # Not through its logger: the surrogate would be in pytest's own capture, which a parallel run cannot send on.
    handler.handle(logging.makeLogRecord({"name": "x", "levelno": logging.INFO, "levelname": "INFO", "msg": said}))
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == said and "é" in line


def test_libraries_that_tell_every_url_are_kept_quiet_unless_a_level_is_set_already(capsys):
    logging.getLogger("httpcore").setLevel(logging.DEBUG)
    logs.configure("producer", run="r", id="t")
    for name in CHATTY:
        logging.getLogger(name).info("GET http://tools/?key=secret")
        logging.getLogger(f"{name}.part").warning("retrying")
    told = [(record["logger"], record["message"]) for record in records(capsys)]
    assert [name for name, message in told if "secret" in message] == ["httpcore"]
    assert [name for name, message in told if message == "retrying"] == [f"{name}.part" for name in CHATTY]


def test_a_text_line_is_short_and_what_follows_is_indented(capsys, monkeypatch):
    monkeypatch.setenv(logs.FORM, "text")
    logs.configure("producer", run="demo", id="producer-0")
    logs.bind(policy_version=lambda: make_version(2, 37))
    try:
        raise ValueError("not so")
    except ValueError:
        logging.getLogger("x").exception("failed\n2026-01-01 00:00:00.000 ERROR forged \x1b[31m")
    shown = capsys.readouterr().err
    first, second, *trace = shown.splitlines()
    assert first[23:] == " ERROR producer-0 v2:37 failed"
    assert second == "    2026-01-01 00:00:00.000 ERROR forged \\x1b[31m", "it neither poses as a record nor steers"
    assert trace[0] == "    Traceback (most recent call last):" and trace[-1] == "    ValueError: not so"


def test_a_json_line_is_shown_to_a_person_as_text_and_any_other_as_it_is(capsys):
    logs.configure("trainer", run="demo", id="host-1")
    logging.getLogger("x").info("resuming")
    line = capsys.readouterr().err.strip()
    assert logs.line_as_text(line)[23:] == " INFO trainer resuming"
    for other in ("", "plain", '{"time": 3}', '{"time": "torn', "1:M 21 Nov * Ready"):
        assert logs.line_as_text(other) == other


def test_libraries_that_set_themselves_up_are_adopted(capsys):
    library = logging.getLogger("a_library")
    library.propagate = False
    library.setLevel(logging.WARNING)
    library.addHandler(logging.StreamHandler(sys.stderr))
    logs.configure("trainer", run="r", id="t")
    library.info("beneath its own level")
    logging.getLogger("a_library.part").warning("said once")
    assert [(record["logger"], record["message"]) for record in records(capsys)] == [("a_library.part", "said once")]


def test_an_unknown_form_is_refused(monkeypatch):
    monkeypatch.setenv(logs.FORM, "xml")
    with pytest.raises(ConfigError, match="PENSTOCK_LOG = 'xml': expected 'json' or 'text'"):
        logs.configure("trainer", run="r", id="t")


@pytest.mark.parametrize(
    "body",
    [
        "raise RuntimeError('deep\\ntrouble')",
        "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='worker')\nt.start(); t.join()",
    ],
    ids=["main thread", "another thread"],
)
def test_an_uncaught_exception_is_one_record_with_its_traceback(body):
    shown = run(
        f"from penstock.schemas.process import logs\nlogs.configure('trainer', run='r', id='t')\n{body}\n",
        PENSTOCK_LOG="",
    )
    (line,) = shown.stderr.splitlines()
    record = json.loads(line)
    assert record["level"] == "CRITICAL" and "Traceback (most recent call last)" in record["traceback"]
    assert "deep\ntrouble" in record["message"] or record["message"].startswith("worker: ZeroDivisionError")


def test_a_child_process_inherits_form_and_fields():
    program = (
        "import os, subprocess, sys\n"
        "from penstock.schemas.process import logs\n"
        "if len(sys.argv) == 1:\n"
        "    logs.configure('producer', run='r', id='producer-3')\n"
        "    logs.hand_down()\n"
        "    sys.exit(subprocess.call([sys.executable, '-c', os.environ['PROGRAM'], 'child']))\n"
        "logs.inherit('engine')\n"
        "import logging\n"
        "logging.getLogger('vllm').warning('from the engine')\n"
    )
    (line,) = run(program, PENSTOCK_LOG="json", PROGRAM=program).stderr.splitlines()
    record = json.loads(line)
    assert (record["role"], record["id"], record["run"]) == ("engine", "producer-3", "r")
