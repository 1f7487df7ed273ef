"""`penstock prometheus RUN` writes the scrape configuration of a run on this machine."""

import argparse
import json
import re
import shlex
from pathlib import Path

from penstock.deploy.launch.command_line import Command, add_run
from penstock.deploy.launch.run_folder import RUN_FILE
from penstock.schemas.config import ConfigError
from penstock.schemas.process.redis_url import connection_file

HERE = Path(__file__).parent
TEMPLATE = HERE / "one_machine.yml"
RULES = HERE / "rules"
REDIS_JOB = """
  - job_name: redis # redis_exporter, for the server's memory
    static_configs:
      - { targets: [%s] }
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument(
        "--redis-exporter",
        metavar="HOST:PORT",
        help="scrape redis_exporter at this address, for the memory of Redis",
    )


def write_prometheus_config(run_folder: Path, redis_exporter: str | None = None) -> Path:
    """Writes `<run>/prometheus.yml`, which finds the run's processes through the files in `<run>/metrics/`.

    redis_exporter: `host:port` of the exporter for its Redis; None leaves Redis out.

    Raises:
        ConfigError: not an address, or a folder name that Prometheus takes for a pattern.
    """
    if redis_exporter is not None and not re.fullmatch(r"(\[[0-9a-f:]+\]|[\w.-]+):\d+", redis_exporter):
        raise ConfigError(f"--redis-exporter {redis_exporter!r}: expected HOST:PORT, as in 127.0.0.1:9121")
    folder = run_folder.resolve()
    if "*" in str(folder):
        raise ConfigError(f"{folder}: Prometheus takes * for a pattern; expected a path without it")
    text = TEMPLATE.read_text()
    for name, path in (("RULES", RULES), ("RUN", folder)):
        text = text.replace(f'"{name}/', json.dumps(f"{path}/")[:-1])
    if redis_exporter is not None:
        text += REDIS_JOB % json.dumps(redis_exporter)
    file = folder / "prometheus.yml"
    file.write_text(text)
    return file


def exporter_command(run_folder: Path, address: str) -> str | None:
    """Returns the shell command that serves the metrics of the run's own Redis at `address`; None if it is not running.

    The command reads the password, which changes at each start, from the connection file.
    """
    file = connection_file(run_folder.resolve())
    try:
        socket = json.loads(file.read_text())["socket"]
    except FileNotFoundError:
        return None
    password = f"$(sed 's|.*://:\\([^@]*\\)@.*|\\1|' {shlex.quote(str(file))})"
    command = ["prometheus-redis-exporter", f"--redis.addr=unix://{socket}", f"--web.listen-address={address}"]
    return f"REDIS_PASSWORD={password} {shlex.join(command)}"


def _prometheus(arguments: argparse.Namespace) -> int:
    folders = (Path(arguments.run), arguments.runs / arguments.run)
    found = [folder for folder in folders if (folder / RUN_FILE).is_file()]
    if not found:
        raise ConfigError(f"{arguments.run}: neither a run's folder nor a run in {arguments.runs}")
    file = write_prometheus_config(found[0], arguments.redis_exporter)
    data = file.parent / "prometheus"
    print(f"wrote {file}; with Prometheus installed:\n")
    print(shlex.join(["prometheus", f"--config.file={file}", f"--storage.tsdb.path={data}"]))
    if arguments.redis_exporter is not None:
        command = exporter_command(file.parent, arguments.redis_exporter)
        if command is None:
            print("\nthe run's own Redis is not running, so there is no command for redis_exporter")
        else:
            print(f"\nand redis_exporter, for as long as this Redis runs:\n\n{command}")
    return 0


COMMAND = Command(
    "prometheus", "write the Prometheus configuration of a run on this machine", _add_arguments, _prometheus
)
