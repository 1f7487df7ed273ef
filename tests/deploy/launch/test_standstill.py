"""The reasons for which a run cannot go on are told in one line each, with what helps."""

import shutil
from types import SimpleNamespace

import redis

from penstock.deploy.launch import standstill
from penstock.deploy.launch.standstill import Standstill
from penstock.schemas.config import EnvironmentConfig, ModelConfig, RunConfig
from penstock.schemas.heartbeat import encode_heartbeat
from penstock.schemas.keys import Keys
from penstock.schemas.producer_parity import ProducerParity, encode_parity
from wire_examples import heartbeat

CONFIG = RunConfig(name="r", model=ModelConfig(path="m"), environment=EnvironmentConfig(path="a:B"))
FULL_DISK = "MISCONF Errors writing to the AOF file: No space left on device"


class Server:
    """Answers as Redis does, or raises `error`."""

    def __init__(self) -> None:
        self.error: redis.RedisError | None = None
        self.used_memory = 1
        self.values: dict[str, bytes] = {}
        self.findings: dict[bytes, bytes] = {}

    def ping(self) -> None:
        if self.error is not None:
            raise self.error

    def scan_iter(self, pattern: str, count: int) -> list[str]:
        return list(self.values)

    def mget(self, names: list[str]) -> list[bytes]:
        return [self.values[name] for name in names]

    def info(self, section: str) -> dict[str, int]:
        return {"used_memory": self.used_memory, "maxmemory": 1_000_000_000}

    def hgetall(self, key: str) -> dict[bytes, bytes]:
        return self.findings if key == Keys("r").parity else {}


def test_each_reason_is_told_once_it_has_held_and_is_forgotten_once_it_is_over(tmp_path, monkeypatch):
    now, room = [0.0], [1 << 40]
    monkeypatch.setattr(standstill, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=room[0]))
    monkeypatch.delenv("REDIS_URL", raising=False)
    server = Server()
    seen = Standstill(CONFIG, tmp_path, server)  # type: ignore[arg-type]

    def reason_after(seconds: float, num_booting: int = 0) -> str:
        for _ in range(int(seconds)):
            now[0] += 1.0
            seen.look(num_booting)
        return seen.reason

    assert reason_after(10) == "", "no producer has served yet"
    server.values = {
        name: encode_heartbeat(heartbeat(name, instance=f"of-{name}")) for name in ("producer-0", "producer-1")
    }
    assert reason_after(4) == "" and seen.heartbeats.keys() == {"producer-0", "producer-1"}

    finding = ProducerParity(producer_id="producer-1", quarantined_s=1.0, reason="0.3 nats, 0.03 are allowed")
    for error, said in (
        (
            redis.ConnectionError("Connection refused"),
            "the run's own Redis does not answer: Connection refused; the run",
        ),
        (redis.TimeoutError(), "the run's own Redis does not answer: TimeoutError; the run goes on once it does"),
        (redis.ResponseError(FULL_DISK), f"the run's own Redis refuses to write: {FULL_DISK}; make room on its disk"),
    ):
        server.error = error
        assert reason_after(2) == "" and reason_after(2).startswith(said), said
        assert not seen.heartbeats
        server.error = None
        assert reason_after(1) == ""
    server.used_memory = 1_000_000_001
    assert "is full: 1000 MB; stop the run, and resume it with a larger redis.maxmemory_mb" in reason_after(5)
    server.used_memory, room[0] = 1, 1_000_000
    assert f"the disk of {tmp_path / 'r'} is full: 1 MB are free; make room" in reason_after(5)
    room[0] = 1 << 40
    server.findings = {b"of-producer-1": encode_parity(finding)}
    assert reason_after(5) == "", "the other one is trained from"
    server.findings[b"of-producer-0"] = encode_parity(finding)
    assert reason_after(5).startswith("every producer is quarantined: producer-1: 0.3 nats, 0.03 are allowed; repair")
    server.values = {}
    assert reason_after(5, num_booting=1) == "", "one is on its way"
    assert reason_after(5).startswith(
        f"no producer is alive: the logs are in {tmp_path / 'r' / 'logs'}; the run goes on"
    )
