"""What is in a run's weight log, and who holds which policy."""

import time
from pathlib import Path

import msgspec
import pytest
import torch

from penstock.schemas.heartbeat import encode_heartbeat
from penstock.schemas.keys import Field
from real_server import installed_servers
from short_run import ShortRun
from wire_examples import heartbeat
from written_log import WrittenLog

pytestmark = pytest.mark.redis


@pytest.fixture(scope="session")
def server_binary() -> Path:
    """One server will do: what is asked of it here, others are asked by every reader of the log."""
    return next(iter(installed_servers().values()))


@pytest.fixture
def run(redis_url, tmp_path, monkeypatch, redis_client):
    run = ShortRun(redis_url, tmp_path, monkeypatch)
    redis_client.hset(run.keys.commit, mapping={"epoch": 0, "policy_version": 3, "announced:0": 3})
    yield run
    run.close()


def policy(version: int) -> dict[str, torch.Tensor]:
    """1,000 elements, of which 10 differ from one version to the next."""
    weights = torch.arange(1000, dtype=torch.float32)
    weights[:10] += version
    return {"w": weights}


def written(client, run: ShortRun, last: int = 3, **places: str) -> WrittenLog:
    log = WrittenLog(client, run.keys, **places)
    for version in range(last + 1):
        log.announce(version, policy(version))
    return log


def beat(client, run: ShortRun, producer_id: str, version: int, host: str) -> None:
    sent = heartbeat(producer_id, policy_version=version, host=host)
    client.set(run.keys.producer(producer_id), encode_heartbeat(sent), ex=60)


def test_each_version_is_listed_with_its_kind_its_density_and_its_bytes(run, redis_client, tmp_path, capsys):
    folder = str(tmp_path / "anchors")
    log = written(redis_client, run, anchors=folder)
    anchor = log.anchor(2)
    found = run.json(capsys, "weights", "test")
    assert (found["newest_version"], found["newest_steps"], found["finished"]) == (3, 2, False)
    kinds = [(each["version"], each["delta_of"], each["announced"], each["anchor"]) for each in found["policies"]]
    assert kinds == [
        (0, None, True, True),
        (1, 0, True, False),
        (2, None, False, True),
        (2, 1, True, False),
        (3, 2, True, False),
    ]
    zero, one, *_, three = found["policies"]
    assert (zero["num_changed"], zero["store"], zero["parent_version"]) == (None, folder, -1)
    assert (one["num_changed"], one["num_elements"], one["dense_bytes"], one["store"]) == (10, 1000, 4000, "redis")
    assert one["chunk_bytes"] < 400 < zero["chunk_bytes"] and [one["num_steps"], three["num_steps"]] == [2, 2]
    assert found["newest_bytes"] == three["chunk_bytes"] + anchor.chunk_bytes
    out = run.command(capsys, "weights", "test")[1]
    assert "Run test: newest policy 3, 4 versions kept" in out and " bytes, the anchor and 1 deltas" in out
    assert "delta of 2" in out and "1.00%" in out and out.index("delta of 2") < out.index("delta of 0")


def test_what_the_stores_hold_lack_and_hold_too_much_is_told(run, redis_client, tmp_path, capsys):
    folder = tmp_path / "anchors"
    log = written(redis_client, run, anchors=str(folder))
    log.store("redis").put("4-delta-0-0", b"being written")
    (folder / "0-whole-0-0").unlink()
    stores = run.json(capsys, "weights", "test")["stores"]
    counts = [(each["place"], each["num_chunks"], each["num_missing"], each["num_unnamed"]) for each in stores]
    assert sorted(counts) == [(str(folder), 1, 1, 0), ("redis", 3, 0, 1)]
    manifest = msgspec.structs.replace(log.announce(4, policy(4)), version=5, store="odd://b")
    redis_client.xadd(run.keys.policy, {Field.MANIFEST: msgspec.json.encode(manifest)}, id="5-1")
    status, out, _ = run.command(capsys, "weights", "test")
    assert status == 0 and "1 of them are MISSING" in out
    assert "odd://b: 1 chunks" in out and "it cannot be listed: 'odd://b': no file system for this URL" in out


def test_a_policy_to_which_no_anchor_leads_is_named(run, redis_client, capsys):
    log = written(redis_client, run)
    log.drop(0, 1)
    found = run.json(capsys, "weights", "test")
    assert (found["newest_steps"], [each["num_steps"] for each in found["policies"]]) == (None, [None, None])
    assert "joining  not possible: no anchor leads to" in run.command(capsys, "weights", "test")[1]


def test_who_holds_what_is_told_by_version_and_host(run, redis_client, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    written(redis_client, run)
    for number in range(7):
        beat(redis_client, run, f"p{number}", 3, f"host-{number % 6}")
    beat(redis_client, run, "late", 1, "far\x1b[2J")
    redis_client.set(run.keys.producer("new"), b"{}", ex=60)
    found = run.json(capsys, "weights", "test")
    newest, old = found["holders"]
    assert (newest["version"], newest["lag"], len(newest["producers"])) == (3, 0, 7)
    assert newest["hosts"]["host-0"] == 2 and len(newest["hosts"]) == 6
    assert (old["version"], old["lag"], old["producers"]) == (1, 2, ["late"]) and found["num_unreadable"] == 1
    out = run.command(capsys, "weights", "test")[1]
    assert "host-0 (2), host-1, host-2, host-3 and 2 more" in out and "p0, p1, p2, p3 and 3 more" in out
    assert "far\\x1b[2J" in out and "1 producers send heartbeats of another release" in out


def test_entries_that_are_no_manifests_are_named_and_a_log_without_another_is_refused(run, redis_client, capsys):
    def refused(name: str) -> str:
        status, _, err = run.command(capsys, "weights", name)
        assert status == 2 and "Traceback" not in err
        return err

    assert "run test: no policy on its policy stream: none has been announced yet" in refused("test")
    assert "nothing: neither a folder, nor a run" in refused("nothing")
    no_manifest = {Field.MANIFEST: b'{"version": "x"}'}
    redis_client.xadd(run.keys.policy, no_manifest, id="7-1")
    assert "policy stream: {test}:policy 7-1 is no manifest: " in refused("test")
    redis_client.delete(run.keys.policy)
    written(redis_client, run, 1)
    redis_client.xadd(run.keys.policy, no_manifest, id="7-1")
    redis_client.hset(run.keys.anchors, b"\x1b[2J", b"")
    found = run.json(capsys, "weights", "test")
    assert (found["newest_version"], len(found["unreadable"])) == (1, 2)
    status, out, _ = run.command(capsys, "weights", "test")
    assert status == 0 and "PROBLEM  {test}:policy 7-1 is no manifest: Expected `int`" in out and "\x1b" not in out


def test_what_a_trainer_has_published_is_whole_and_says_when(run, redis_client, capsys):
    redis_client.flushall()
    run.producer()
    began_s = time.time()
    assert run.trainer().run()
    found = run.json(capsys, "weights", "test")
    assert (found["newest_version"], found["finished"], found["unreadable"]) == (12, True, [])
    assert {each["version"] for each in found["policies"] if each["announced"]} >= set(range(5, 13))
    assert f"newest policy 12 of {time.strftime('%Y')}" in run.command(capsys, "weights", "test")[1]
    assert all(began_s <= each["time_s"] <= time.time() and each["num_steps"] for each in found["policies"])
    assert [(each["num_missing"], each["num_unnamed"], each["problem"]) for each in found["stores"]] == [(0, 0, "")]
