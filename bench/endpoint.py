"""The endpoint section: what agents' calls cost, beside vLLM's own server and beside encoding everything anew."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bench.endpoint_encoding import EncodingSettings, encoding_figures
from bench.endpoint_gateway import GatewaySettings, gateway_figures
from bench.pipeline import scratch
from bench.result import Figure, Result, describe_machine, now


class EndpointSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How much and how often. The defaults take about three minutes on two quiet cores."""

    gateway: GatewaySettings = GatewaySettings()
    encoding: EncodingSettings = EncodingSettings()


QUICK_ENDPOINT = EndpointSettings(
    gateway=GatewaySettings(contexts=(1500, 3000), rounds=1, calls=6),
    encoding=EncodingSettings(calls=10, turn_tokens=100, answer_tokens=50),
)
"""Shows that everything runs. Its figures mean nothing. Most of its minute goes into booting two engines."""


class _Bench:
    """One run of the section: its rows."""

    def __init__(self, settings: EndpointSettings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder

    def encoding(self) -> list[Figure]:
        return encoding_figures(self._settings.encoding)

    def gateway(self) -> list[Figure]:
        return gateway_figures(self._settings.gateway, self._folder)


ENDPOINT_ROWS: dict[str, Callable[[_Bench], list[Figure]]] = {
    "encoding": _Bench.encoding,
    "gateway": _Bench.gateway,
}


def measure_endpoint(rows: Sequence[str], settings: EndpointSettings, run_file: Path, work: Path) -> Result:
    """Measures the named rows of `ENDPOINT_ROWS` in order; the run file plays no part here.

    Raises:
        BenchError, ServerError: a row could not be measured.
    """
    machine, date, began = describe_machine(), now(), time.monotonic()
    figures: list[Figure] = []
    with scratch(work) as folder:
        bench = _Bench(settings, folder)
        for row in rows:
            print(f"endpoint: {row} ...", flush=True)
            figures += ENDPOINT_ROWS[row](bench)
    return Result(
        section="endpoint",
        date=date,
        machine=machine,
        settings=msgspec.to_builtins(settings),
        wall_s=time.monotonic() - began,
        figures=tuple(figures),
    )
