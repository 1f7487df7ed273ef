"""Opens a producer's connection to a Redis in the test's process."""

import fakeredis

from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.connection import ProducerConnection


def fake_connection(server: fakeredis.FakeServer, metrics: ProducerMetrics, outage_s: float) -> ProducerConnection:
    """Opens a connection to `server`, with the timeouts of `ProducerConnection.open`.

    redis-py's own default would wrap every send in `asyncio.wait_for`, which on Python 3.11 can swallow a cancellation.
    """
    clients = [fakeredis.FakeAsyncRedis(server=server, protocol=2, socket_timeout=None) for _ in range(2)]
    threads = fakeredis.FakeRedis(server=server, protocol=2)
    return ProducerConnection(*clients, threads, outage_s=outage_s, metrics=metrics)
