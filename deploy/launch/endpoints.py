"""Reads the metrics endpoint of one of a run's processes, as Prometheus does."""

import json
import math
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 2.0
_MAX_BYTES = 8_000_000
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
        for own_labels, value in self._by_name.get(name, ()):
            if labels.items() <= own_labels.items():
                return None if math.isnan(value) else value
        return None


def scrape(run_folder: Path, role: str) -> Samples | None:
    """Reads the endpoint whose `host:port` is in the run's `metrics/<role>.json`; None if there is none, or it does not
    answer in Prometheus' format within `_TIMEOUT_S`."""
    try:
        targets = json.loads((run_folder / "metrics" / f"{role}.json").read_text("utf-8"))
        with _OPENER.open(f"http://{targets[0]['targets'][0]}/metrics", timeout=_TIMEOUT_S) as answer:
            text = answer.read(_MAX_BYTES).decode()
            return None if answer.length else Samples(text)  # `length`: bytes announced and not sent
    except (OSError, ValueError, LookupError, TypeError, HTTPException):  # an invalid host, a port of another protocol
        return None
