"""Where a run's Redis is, and where its processes expose metrics: small files every later command can find."""

import json
import os
from pathlib import Path

from schemas.config import ConfigError, RunConfig


def connection_file(run_folder: Path) -> Path:
    """Written (mode 0600) by the launcher of an embedded server: `{"url": ...}`."""
    return run_folder / "redis" / "connection.json"


def redis_url(config: RunConfig, runs: Path) -> str:
    """REDIS_URL, else the run file's `redis.url`, else the run's own server.

    Raises:
        ConfigError: none of them is there.
    """
    url = os.environ.get("REDIS_URL") or config.redis.url
    if url:
        return url
    file = connection_file(config.folder(runs))
    try:
        return str(json.loads(file.read_text())["url"])
    except FileNotFoundError:
        raise ConfigError(
            f"no Redis: REDIS_URL and redis.url are not set and {file} does not exist; "
            "start the run with `penstock run`, or set REDIS_URL"
        ) from None


def register_metrics_port(run_folder: Path, role: str, host: str, port: int) -> None:
    """Leaves `<run>/metrics/<role>.json` in Prometheus' file_sd format."""
    file = run_folder / "metrics" / f"{role}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    target = [{"targets": [f"{host}:{port}"], "labels": {"run": run_folder.name, "role": role}}]
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(target))
    partial.replace(file)
