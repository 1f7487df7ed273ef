"""Scrapes the metrics endpoints of a run's processes, as Prometheus does."""

import json
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 2.0
_MAX_BYTES = 8_000_000
_AT_ONCE = 8
# Ignores the proxies of the environment: endpoints are on the run's own network.
_OPENER = build_opener(ProxyHandler({}))


class Samples:
    """The numbers of one scrape, by sample name and labels."""

    def __init__(self, text: str) -> None:
        """Raises ValueError if `text` is not in Prometheus' text format."""
        self._by_name: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    self._by_name.setdefault(sample.name, []).append((sample.labels, sample.value))
        except LookupError as error:  # raised by the parser for some broken lines
            raise ValueError(f"no Prometheus text: {error}") from error

    def get(self, name: str, **labels: str) -> float | None:
        """Returns the first sample of this name with these labels; None if there is none, or it is NaN."""
        for found, value in self._by_name.get(name, ()):
            if labels.items() <= found.items():
                return None if math.isnan(value) else value
        return None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Returns the samples of this name by the value of `label`."""
        return {labels[label]: value for labels, value in self._by_name.get(name, ()) if label in labels}

    def label(self, name: str, label: str) -> str | None:
        """Returns the value of `label` on the first sample of this name that has it; None without one."""
        return next(iter(self.by_label(name, label)), None)


class MetricsEndpoint(NamedTuple):
    """The answer of one address. samples: None without an answer; `problem` says why."""

    role: str
    address: str
    samples: Samples | None
    problem: str = ""


def targets(run_folder: Path) -> dict[str, str]:
    """Reads `host:port` by role from the run's `metrics/*.json`; skips unreadable files."""
    found: dict[str, str] = {}
    for file in sorted((run_folder / "metrics").glob("*.json")):
        try:
            found[file.stem] = str(json.loads(file.read_text())[0]["targets"][0])
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return found


def scrape(addresses: Iterable[tuple[str, str]]) -> list[MetricsEndpoint]:
    """Scrapes each (role, address), `_AT_ONCE` at a time, with a timeout of `_TIMEOUT_S`."""
    wanted = list(addresses)
    if not wanted:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(wanted))) as pool:
        return list(pool.map(_look, wanted))


def _look(target: tuple[str, str]) -> MetricsEndpoint:
    role, address = target
    try:
        with _OPENER.open(f"http://{address}/metrics", timeout=_TIMEOUT_S) as answer:
            text = answer.read(_MAX_BYTES).decode()
            if answer.length:  # bytes announced and not sent
                raise ValueError(f"its answer lacks {answer.length:,} bytes")
            return MetricsEndpoint(role, address, Samples(text))
    except URLError as error:
        return MetricsEndpoint(role, address, None, str(error.reason))
    except (OSError, ValueError, HTTPException) as error:  # an invalid host name, a port of another protocol
        return MetricsEndpoint(role, address, None, str(error) or type(error).__name__)
