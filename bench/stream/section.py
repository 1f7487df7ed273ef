"""The stream section: the cost of crossing Redis, each figure against a reference measured in turn with it."""

from bench.pipeline.records import record_figures
from bench.result import Figure
from bench.section import Bench, BenchSection
from bench.stream.measuring import QUICK_STREAM, StreamSettings
from bench.stream.rates import append_figures, producers_figures, read_figures
from bench.stream.reliability import reliability_figures
from bench.stream.whole import memory_figures, peer_figures


def encode_figures(bench: Bench) -> list[Figure]:
    """Returns the figure of the records that belongs to this section too."""
    return [figure for figure in record_figures() if figure.name == "encoding a group"]


STREAM = BenchSection(
    "stream",
    {
        "encode": encode_figures,
        "xadd": append_figures,
        "read": read_figures,
        "peers": peer_figures,
        "producers": producers_figures,
        "memory": memory_figures,
        "reliability": reliability_figures,
    },
    StreamSettings(),
    QUICK_STREAM,
    uses_run_file=True,
)
