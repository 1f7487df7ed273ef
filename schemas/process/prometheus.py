"""What the metrics of producer and trainer share in Prometheus' client."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric


class LabelledRegistry(CollectorRegistry):
    """A registry that puts the same labels on every sample."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        super().__init__()
        self._every = dict(labels)

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            family.samples = [one._replace(labels={**self._every, **one.labels}) for one in family.samples]
            yield family
