"""`penstock inspect RUN`: serves a run's rollouts as pages on this machine."""

import signal

from penstock.deploy.launch.command_line import DEFAULT_RUNS, Run, Runs
from penstock.schemas.config import ConfigError

DEFAULT_PORT = 8642


def command(run: Run, /, *, runs: Runs = DEFAULT_RUNS, port: int = DEFAULT_PORT, host: str = "127.0.0.1") -> int:
    """Look at a run's rollouts, token by token, in a browser.

    Args:
        port: 0 takes a free one
        host: IPv4 address to listen on, by default for this machine only; 0.0.0.0 in a container, whose published port
            then says who reaches it

    Raises:
        ConfigError: no such run, or one without a record.
    """
    from penstock.deploy.operate.run_access import find_run

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        name, folder, config = find_run(run, runs)
        if folder is None:
            raise ConfigError(f"{name}: no run folder in {runs}; the record of its rollouts is in it")
        print(f"{name}: reading its rollouts, loading its tokenizer ...", flush=True)
        from penstock.deploy.inspector.catalogue import Catalogue
        from penstock.deploy.inspector.server import InspectorServer
        from penstock.deploy.report.tokens import texts_of_run
        from penstock.schemas.record import RecordReadError
        from penstock.schemas.record_reader import Record

        texts, remark = texts_of_run(config)
        try:
            catalogue = Catalogue(name, Record(folder), texts, [remark] if remark else [])
        except RecordReadError as error:
            raise ConfigError(str(error)) from None
        with InspectorServer(catalogue, port, host) as server:
            print(f"{name}: {catalogue.num_groups:,} groups of its record", flush=True)
            if remark:
                print(remark, flush=True)
            print(f"{server.url}  (Ctrl-C ends)", flush=True)
            server.serve_forever(poll_interval=0.1)
    except KeyboardInterrupt:
        return 0
    return 0
