"""`penstock prometheus RUN` writes the scrape configuration of a run on this machine."""

import json
import re
import shlex
from pathlib import Path

from penstock.deploy.launch.command_line import DEFAULT_RUNS, Run, Runs
from penstock.deploy.launch.run_folder import RUN_FILE, places_of
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
    text = TEMPLATE.read_text("utf-8")
    for name, path in (("RULES", RULES), ("RUN", folder)):
        text = text.replace(f'"{name}/', json.dumps(f"{path}/")[:-1])
    if redis_exporter is not None:
        text += REDIS_JOB % json.dumps(redis_exporter)
    file = folder / "prometheus.yml"
    file.write_text(text, encoding="utf-8")
    return file


def exporter_command(run_folder: Path, address: str) -> str | None:
    """Returns the shell command that serves the metrics of the run's own Redis at `address`; None if it is not running.

    The command reads the password, which changes at each start, from the connection file.
    """
    file = connection_file(run_folder.resolve())
    try:
        socket = json.loads(file.read_text("utf-8"))["socket"]
    except FileNotFoundError:
        return None
    password = f"$(sed 's|.*://:\\([^@]*\\)@.*|\\1|' {shlex.quote(str(file))})"
    command = ["prometheus-redis-exporter", f"--redis.addr=unix://{socket}", f"--web.listen-address={address}"]
    return f"REDIS_PASSWORD={password} {shlex.join(command)}"


def command(run: Run, /, *, runs: Runs = DEFAULT_RUNS, redis_exporter: str | None = None) -> int:
    """Write the Prometheus configuration of a run on this machine.

    Args:
        redis_exporter: scrape redis_exporter at this HOST:PORT, for the memory of Redis
    """
    found = [folder for folder in places_of(run, runs) if (folder / RUN_FILE).is_file()]
    if not found:
        raise ConfigError(f"{run}: neither a run's folder nor a run in {runs}")
    file = write_prometheus_config(found[0], redis_exporter)
    data = file.parent / "prometheus"
    print(f"wrote {file}; with Prometheus installed:\n")
    print(shlex.join(["prometheus", f"--config.file={file}", f"--storage.tsdb.path={data}"]))
    if redis_exporter is not None:
        serving = exporter_command(file.parent, redis_exporter)
        if serving is None:
            print("\nthe run's own Redis is not running, so there is no command for redis_exporter")
        else:
            print(f"\nand redis_exporter, for as long as this Redis runs:\n\n{serving}")
    return 0
