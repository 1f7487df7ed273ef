"""The producer's Prometheus metrics."""

from typing import Any

from penstock.schemas.metrics import ProducerMetric
from penstock.schemas.process.prometheus import LabelledRegistry


class ProducerMetrics:
    """Every `ProducerMetric` in a registry of its own, so that several producers fit one process. The counter of
    `ProducerMetric.TOKENS_GENERATED` is `metrics.tokens_generated`, and so on.

    labels: put on each sample, such as `run="demo", producer="producer-0"`.
    """

    def __init__(self, **labels: str) -> None:
        self.registry = LabelledRegistry(labels)
        self._made = {name.lower(): made for name, made in self.registry.make_all(ProducerMetric).items()}

    def __getattr__(self, name: str) -> Any:
        """Returns the counter, gauge or histogram of that name."""
        try:
            return self.__dict__["_made"][name]
        except KeyError:
            raise AttributeError(f"{name}: no metric of a producer; expected the name of a ProducerMetric") from None
