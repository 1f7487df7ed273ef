"""`penstock inspect RUN`: serves a run's rollouts as pages on this machine."""

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.deploy.launch.command_line import DEFAULT_RUNS, Run, Runs
from penstock.schemas.config import ConfigError

if TYPE_CHECKING:
    from penstock.deploy.inspector.sources import RecordSource, Source
    from penstock.deploy.inspector.stream import StreamSource

DEFAULT_PORT = 8642
WITHOUT_RECORD = (
    "the run has no record: only groups that are on its live stream now are shown; "
    "record = true in the run file keeps every group"
)


def command(
    run: Run,
    /,
    *,
    runs: Runs = DEFAULT_RUNS,
    port: int = DEFAULT_PORT,
    host: str = "127.0.0.1",
    stream: bool = False,
) -> int:
    """Look at a run's rollouts, token by token, in a browser.

    Args:
        port: 0 takes a free one
        host: IPv4 address to listen on, by default for this machine only; 0.0.0.0 in a container, whose published port
            then says who reaches it
        stream: look at the live rollout stream even if the run has a record (record = true)
    """
    from penstock.deploy.operate.run_access import find_run

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as closing:
        try:
            name, folder, config = find_run(run, runs)
            print(f"{name}: reading its rollouts, loading its tokenizer ...", flush=True)
            from penstock.deploy.inspector.catalogue import Catalogue
            from penstock.deploy.inspector.server import InspectorServer
            from penstock.deploy.inspector.tokens import texts_of_run

            record = None if stream else _record(folder)
            source: Source = record or _stream(run, runs, closing)
            texts, why = texts_of_run(config)
            is_kept = stream or record is not None or (config is not None and config.record)
            remarks = [remark for remark in (why, "" if is_kept else WITHOUT_RECORD) if remark]
            catalogue = Catalogue(name, source, texts, remarks)
            server = closing.enter_context(InspectorServer(catalogue, port, host))
            print(f"{name}: {len(source.rows):,} groups of its {source.kind}", flush=True)
            for remark in remarks:
                print(remark, flush=True)
            print(f"{server.url}  (Ctrl-C ends)", flush=True)
            server.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            return 0
    return 0


def _record(folder: Path | None) -> "RecordSource | None":
    """Returns the run's record; None if it has none."""
    from penstock.deploy.inspector.sources import RecordSource
    from penstock.schemas.record import FOLDER, RecordReadError
    from penstock.schemas.record_reader import Record

    if folder is None or not any((folder / FOLDER).glob("*")):
        return None
    try:
        return RecordSource(Record(folder))
    except RecordReadError as error:
        raise ConfigError(str(error)) from None


def _stream(name: str, runs: Path, closing: ExitStack) -> "StreamSource":
    """Returns the run's live stream. Raises ServerError if its Redis cannot be reached."""
    from penstock.deploy.inspector.stream import StreamSource
    from penstock.deploy.operate.run_access import open_run

    run = closing.enter_context(open_run(name, runs))
    return StreamSource(run.redis, run.keys)
