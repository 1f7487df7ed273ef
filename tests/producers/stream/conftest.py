"""Producers' parts on a real server, without their loops."""

from collections.abc import Callable

import pytest

from producer_desk import ProducerDesk


@pytest.fixture
def desk(streams, metrics) -> Callable[..., ProducerDesk]:
    """`desk("b", claim_idle_s=3.0)`: the parts of producer b; all are of one server."""
    return lambda *producer_id, **settings: ProducerDesk(
        streams.connection, streams.client, metrics, *producer_id, **settings
    )
