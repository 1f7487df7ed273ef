"""A real engine on a host that sees no file of a live run joins it through Redis alone."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import redis

from isolated_host import IsolatedHost, has_namespaces
from monitored_run import PACED, MonitoredRun
from penstock.schemas.heartbeat import Heartbeat, decode_heartbeat
from penstock.schemas.keys import Keys
from penstock.schemas.process.redis_url import connection_file
from penstock.schemas.record_reader import Record
from penstock.schemas.rollout import unpack_floats
from waiting import wait_for

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.redis,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not has_namespaces(), reason="no mount namespaces for this user"),
]


def test_an_engine_without_a_base_model_samples_what_the_trainer_expects(
    live_run: MonitoredRun, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    url = json.loads(connection_file(live_run.folder).read_text())["url"]
    hidden = [tmp_path_factory.getbasetemp(), demo_model]
    assert live_run.folder.is_relative_to(hidden[0])
    host = IsolatedHost(url, hidden[: 1 if demo_model.is_relative_to(hidden[0]) else 2])
    (host.folder / "paced.py").write_text(PACED)  # the run's environment: a joining host needs its code
    beat: list[Heartbeat] = []

    def has_appended(num_groups: int) -> bool:
        if data := client.get(Keys(live_run.name).producer("far")):
            beat[:] = [decode_heartbeat(data)]
        return bool(beat) and beat[0].num_groups_appended >= num_groups

    with redis.Redis.from_url(url, protocol=2) as client:
        try:
            join = ["producer", "--join", host.url, "--run", live_run.name, "--id", "far"]
            host.start("-m", "penstock.deploy.cli", *join)
            wait_for(lambda: has_appended(16), timeout_s=300, process=host.process, log=host.log.read_text)
            first = beat[0].policy_version
            wait_for(lambda: has_appended(32) and beat[0].policy_version > first, process=host.process, timeout_s=300)
            host.process.send_signal(signal.SIGTERM)
            assert host.process.wait(120) == 0, host.log.read_text()
            assert beat[0].num_weight_loads_failed == 0
            (model,) = host.folder.glob(f"penstock-{os.getuid()}/{live_run.name}/model-*")
            assert not list(model.glob("*.safetensors"))
        finally:
            host.close()
    gaps = wait_for(lambda: _gaps(live_run, "far"), lambda found: len(found) > 100, timeout_s=300)
    # The lag of an update or two; engines with other weights are off by nats.
    assert np.abs(gaps).mean() < 0.1, np.abs(gaps).mean()


def _gaps(run: MonitoredRun, producer_id: str) -> np.ndarray:
    """Returns proximal minus behavior logprobs of the tokens that this producer sampled and the trainer scored."""
    record, gaps = Record(run.folder), [np.empty(0)]
    for at in record.groups():
        if at.entry.producer_id != producer_id:
            continue
        recorded = record.group(at)
        for rollout, found in zip(recorded.decode().rollouts, recorded.findings, strict=False):
            for segment, of_segment in zip(rollout.segments, found, strict=True):
                if of_segment.proximal_logprobs:
                    proximal = np.frombuffer(of_segment.proximal_logprobs, np.float32)
                    gaps.append(proximal - np.asarray(unpack_floats(segment.behavior_logprobs)))
    return np.concatenate(gaps)
