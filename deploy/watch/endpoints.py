"""The metrics endpoints of a run's processes, read as Prometheus reads them."""

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

_PATIENCE_S = 2.0
_MAX_BYTES = 8_000_000
_AT_ONCE = 8
# A proxy of the environment is for the world outside.
_OPENER = build_opener(ProxyHandler({}))


class Samples:
    """One scrape: numbers by sample name and labels."""

    def __init__(self, text: str) -> None:
        """Raises ValueError for what is no Prometheus text."""
        self._by_name: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    self._by_name.setdefault(sample.name, []).append((sample.labels, sample.value))
        except LookupError as error:  # the parser's, of some broken lines
            raise ValueError(f"no Prometheus text: {error}") from error

    def get(self, name: str, **labels: str) -> float | None:
        """The first sample of this name with these labels; None where there is none, or no number."""
        for found, value in self._by_name.get(name, ()):
            if labels.items() <= found.items():
                return None if math.isnan(value) else value
        return None

    def label(self, name: str, label: str) -> str | None:
        """What the first sample of this name says under `label`."""
        return next((labels[label] for labels, _ in self._by_name.get(name, ()) if label in labels), None)


class MetricsEndpoint(NamedTuple):
    """What one address answered. samples: None where it did not, and `problem` then says why."""

    role: str
    address: str
    samples: Samples | None
    problem: str = ""


def targets(run_folder: Path) -> dict[str, str]:
    """`host:port` by role, from the run's `metrics/*.json`; a file that cannot be read is passed over."""
    found: dict[str, str] = {}
    for file in sorted((run_folder / "metrics").glob("*.json")):
        try:
            found[file.stem] = str(json.loads(file.read_text())[0]["targets"][0])
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return found


def scrape(addresses: Iterable[tuple[str, str]]) -> list[MetricsEndpoint]:
    """One look at each (role, address), several at once; none takes much longer than `_PATIENCE_S`."""
    wanted = list(addresses)
    if not wanted:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(wanted))) as pool:
        return list(pool.map(_look, wanted))


def _look(target: tuple[str, str]) -> MetricsEndpoint:
    role, address = target
    try:
        with _OPENER.open(f"http://{address}/metrics", timeout=_PATIENCE_S) as answer:
            text = answer.read(_MAX_BYTES).decode()
            if answer.length:  # of what it has announced
                raise ValueError(f"its answer lacks {answer.length:,} bytes")
            return MetricsEndpoint(role, address, Samples(text))
    except URLError as error:
        return MetricsEndpoint(role, address, None, str(error.reason))
    except (OSError, ValueError, HTTPException) as error:  # a host of odd characters, a port that talks otherwise
        return MetricsEndpoint(role, address, None, str(error) or type(error).__name__)
