"""Weight pick-up: the newest policy, verified, and the old one serving where that fails."""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from safetensors.numpy import load_file

from penstock.producers.interfaces import Restore, WeightLoadError
from penstock.producers.weights import follower as module
from penstock.producers.weights.follower import WeightFollower
from penstock.producers.weights.host_copy import HostCopy
from penstock.schemas.keys import Keys
from penstock.schemas.policy import WeightManifest, make_version
from penstock.schemas.weights.reading import WeightReader
from scripted_engine import ScriptedEngine
from waiting import until

KEYS = Keys("test")


class Pickup:
    """WeightFollower at work on a real server, with a trainer's hand to announce."""

    def __init__(self, weights: WeightFollower, engine: ScriptedEngine, trainer, loads: list[dict[str, Any]]) -> None:
        self.weights = weights
        self.engine = engine
        self.trainer = trainer
        self.loads = loads
        self.tasks: list[asyncio.Task] = []

    def start(self) -> None:
        self.tasks = [asyncio.create_task(part()) for part in (self.weights.follow, self.weights.keep_current)]

    async def serves(self, version: int) -> None:
        await until(lambda: self.weights.loaded and self.engine.policy_version == version)

    async def serving(self, version: int) -> "Pickup":
        """Starts, and waits until the engine serves a policy announced as `version`."""
        self.trainer.announce(version)
        self.start()
        await self.serves(version)
        return self


@pytest.fixture
async def pickup(
    redis_server, connect, make_config, hand_trainer, metrics, tmp_path, monkeypatch
) -> AsyncIterator[Callable[..., Pickup]]:
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(module, "LONGEST_RETRY_S", 0.1)
    server, config, built = redis_server(), make_config(), []

    def build(engine_type: type[ScriptedEngine] = ScriptedEngine, *, place: str = "", **engine_settings) -> Pickup:
        engine, loads = engine_type(**engine_settings), []
        trainer = hand_trainer(server.client, config, tmp_path)
        connection = connect(server)
        reader = WeightReader(connection.call, KEYS)
        copy = HostCopy(str(tmp_path), "test", place or connection.place, reader, metrics)
        weights = WeightFollower(connection, KEYS, engine, copy, metrics, lambda **load: loads.append(load))
        built.append(Pickup(weights, engine, trainer, loads))
        return built[-1]

    yield build
    for made in built:
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)


pytestmark = pytest.mark.redis


async def test_a_new_producer_waits_for_the_first_manifest_and_says_so_once(pickup, caplog) -> None:
    caplog.set_level(logging.INFO)
    made = pickup()
    made.start()
    await until(lambda: "waiting" in caplog.text)
    assert not made.weights.loaded and made.weights.behind == float("inf")
    assert [line for line in caplog.messages if "waiting" in line] == ["waiting for the first weights on {test}:policy"]
    manifest = made.trainer.announce(0)
    await made.serves(0)
    (load,) = made.loads
    assert load["policy_version"] == 0 and load["bytes"] == manifest.chunk_bytes and made.weights.behind == 0


async def test_a_new_producer_starts_with_the_current_policy_reports_its_age_and_leaves_no_copy(
    pickup, metrics, tmp_path
) -> None:
    made = pickup()
    for version in range(4):
        made.trainer.announce(version, created_s=time.time() - 100)
    made.start()
    await made.serves(3)
    await until(lambda: made.loads)
    assert made.engine.loaded_versions == [3]
    age_s = metrics.registry.get_sample_value("penstock_producer_policy_age_seconds")
    assert age_s is not None and 100 <= age_s < 700
    assert len(list(tmp_path.glob("penstock-*"))) == 1
    for task in made.tasks:
        task.cancel()
    await asyncio.wait(made.tasks)
    assert not list(tmp_path.glob("penstock-*"))


async def test_versions_announced_during_a_load_are_overtaken(pickup) -> None:
    made = await pickup().serving(0)
    made.engine.may_load.clear()
    made.trainer.announce(1)
    await until(lambda: made.engine.is_loading)
    for version in range(2, 6):
        made.trainer.announce(version)
    await until(lambda: made.weights.newest is not None and made.weights.newest.version == 5)
    made.engine.may_load.set()
    await made.serves(5)
    assert made.engine.loaded_versions == [0, 1, 5]


async def test_a_load_that_fails_leaves_the_old_version_serving_until_it_is_overtaken(pickup, metrics, caplog) -> None:
    made = await pickup(refuse_versions=(1,)).serving(0)
    failures: list[tuple[dict[str, Any], str, bool]] = [
        ({}, "1", False),  # the engine refuses it
        ({"tensors": ()}, "the pieces of its chunks are not all elements of its tensors", True),
        ({"store": "/no/such/folder"}, "folder /no/such/folder does not give 5-whole-0-0", True),
        ({"store": "nowhere://bucket"}, "no file system for this URL is installed", False),
    ]
    for number, (falsified, message, is_unreadable) in enumerate(failures):
        serving, num_failed = 2 * number, made.weights.num_failed
        made.trainer.announce(serving + 1, **falsified)
        await until(lambda before=num_failed: made.weights.num_failed >= before + 2)
        assert made.engine.policy_version == serving and made.weights.behind == 1
        assert re.search(message, made.weights.last_error)
        assert f"policy {serving} serves on" in caplog.text
        assert made.weights.unreadable_version == (serving + 1 if is_unreadable else -1), message
        made.trainer.announce(serving + 2)
        await made.serves(serving + 2)
        await until(lambda: made.weights.last_error == "" and made.weights.unreadable_version == -1)
    made.trainer.client.xadd(KEYS.policy, {"manifest": "{}"}, id="8-2")
    await until(lambda: "is no manifest" in made.weights.last_error)
    assert metrics.registry.get_sample_value("penstock_weight_loads_total", {"result": "failed"}) >= 9
    made.trainer.client.client_kill_filter(_type="normal", skipme=True)  # the server restarts
    made.trainer.announce(9)
    await made.serves(9)


class ReadingEngine(ScriptedEngine):
    """Reads the file that it is given; each policy's tensor holds the number of its version.

    half_way: a load of these fails after the pause began, and the old weights are asked for.
    read: (label, number in the file) of every load, those of old weights too.
    """

    def __init__(self, *, half_way: tuple[int, ...] = (), **settings) -> None:
        super().__init__(**settings)
        self.half_way = half_way
        self.read: list[tuple[int, float]] = []

    async def load_weights(self, manifest: WeightManifest, path: str, restore: Restore | None = None) -> float:
        self._note(manifest.version, path)
        if manifest.version in self.half_way:
            assert restore is not None
            self._note(self.policy_version, await restore())
            raise WeightLoadError(f"version {manifest.version}: failed half way")
        return await super().load_weights(manifest, path, restore)

    def _note(self, version: int, path: str) -> None:
        (number,) = load_file(path)["weight"]
        self.read.append((version, float(number)))


async def test_after_a_load_that_failed_half_way_the_engine_gets_its_old_weights_back(pickup) -> None:
    made = await pickup(ReadingEngine, half_way=(2,)).serving(1)
    made.trainer.announce(2)
    await until(lambda: made.weights.num_failed >= 2)
    assert made.engine.read[:5] == [(1, 1), (2, 2), (1, 1), (2, 2), (1, 1)]
    made.trainer.announce(3)
    await made.serves(3)
    assert made.engine.read[-1] == (3, 3)


async def test_producers_of_one_host_fetch_once_and_load_the_same_bits_whatever_address_they_know(
    pickup, tmp_path
) -> None:
    pair = [pickup(ReadingEngine, place="here:6379"), pickup(ReadingEngine, place="elsewhere:6379", pause_s=0.01)]
    pair[0].trainer.begin_anew("one")
    for made in pair:
        made.start()
    num_bytes = 0
    for version in range(20):
        num_bytes += pair[0].trainer.announce(version).chunk_bytes
        await asyncio.sleep(0.002)
    for made in pair:
        await made.serves(19)
        assert all(label == number for label, number in made.engine.read)
    assert sum(load["bytes"] for made in pair for load in made.loads) <= num_bytes
    assert len(list(tmp_path.glob("penstock-*"))) == 1


@pytest.mark.parametrize("ids", [("one", "two"), ("", "")])
async def test_the_same_versions_of_a_run_that_is_begun_anew_are_other_weights(pickup, ids) -> None:
    made = pickup(ReadingEngine)
    made.trainer.begin_anew(ids[0])
    for version in range(6):
        made.trainer.announce(version)
    made.start()
    await made.serves(5)
    made.trainer.begin_anew(ids[1])
    made.engine.may_load.clear()
    for version in range(6):
        made.trainer.announce(version, number=100 + version)
    await until(lambda: made.engine.is_loading)
    waiting = asyncio.create_task(made.weights.wait_for(0, 2, ids[1]))
    await asyncio.sleep(0)
    assert made.weights.behind == float("inf") and not waiting.done()
    made.engine.may_load.set()
    await asyncio.wait_for(waiting, 60)
    assert made.engine.read[-1] == (5, 105) and made.weights.run_id == ids[1] and made.weights.behind == 0


async def test_the_same_policy_that_an_emptied_server_gets_again_is_not_loaded_again(pickup) -> None:
    made = pickup()
    made.trainer.begin_anew("one")
    await made.serving(5)
    made.trainer.begin_anew("one")
    await until(lambda: made.weights.behind == float("inf"))
    made.trainer.announce(5)
    await until(lambda: made.weights.behind == 0)
    made.trainer.announce(6)
    await made.serves(6)
    assert made.engine.loaded_versions == [5, 6]


async def test_work_waits_for_weights_within_its_bound_and_for_those_of_a_resumed_trainer(pickup) -> None:
    made = await pickup().serving(60)
    await made.weights.wait_for(62, lag_bound=2)
    for wanted, lag_bound, announced in ((62, 1, 61), (make_version(1, 0), 2, make_version(1, 0))):
        waiting = asyncio.create_task(made.weights.wait_for(wanted, lag_bound))
        await asyncio.sleep(0)
        assert not waiting.done()
        made.trainer.announce(announced)
        await asyncio.wait_for(waiting, 60)
    assert made.engine.loaded_versions == [60, 61, make_version(1, 0)]
