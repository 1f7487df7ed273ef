"""What is in a run's weight log, and who holds which policy."""

import re
import time
from pathlib import Path

import msgspec
import pytest
import torch

from penstock.schemas.heartbeat import encode_heartbeat
from penstock.schemas.keys import Field
from real_server import installed_servers
from short_run import ShortRun
from weight_writer import WrittenLog
from wire_examples import heartbeat

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


VARYING = {
    r"19[67]\d-[-\d]+ [:\d]+": "TIME",
    r"[\d,]+ bytes": "N bytes",
    r"[\d,]+ +[\d.]+%(?= +\d )": "N",
    r" is installed.*": "",
}
SHOWN = r"""
Run test: newest policy 5 of TIME, 6 versions kept
joining N bytes, the anchor and 2 deltas
policy kind changed bytes of dense steps store parent when
5 delta of 3 1.00% N 3 odd://b 3 TIME
4 delta of 3 1.00% N 3 redis 3
3 delta of 2 1.00% N 2 redis 2
2 delta of 1 1.00% N 1 redis 1
2 anchor N 1 FOLDER 1
1 delta of 0 1.00% N 2 redis 0
0 anchor N 1 FOLDER -1
store FOLDER: 2 chunks, N bytes; 1 of them are MISSING
store redis: 4 chunks, N bytes; 1 more that no policy names
store odd://b: 1 chunks, N bytes; it cannot be listed: 'odd://b': no file system for this URL
policy lag producers on hosts which
3 0 7 host-0 (2), host-1, host-2, host-3 and 2 more p0, p1, p2, p3 and 3 more
1 2 1 far\x1b[2J late
1 producers send heartbeats of another release
"""
"""With one space for many, without rules; sizes that the compression decides are N."""


def test_policies_stores_and_holders_are_listed(run, redis_client, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")  # the folder of a worker of xdist is long
    folder = tmp_path / "anchors"
    log = written(redis_client, run, anchors=str(folder))
    anchor = log.anchor(2)
    log.store.put("9-delta-0-0", b"being written")
    (folder / "0-whole-0-0").unlink()
    manifest = msgspec.structs.replace(log.announce(4, policy(4)), version=5, store="odd://b", created_s=1.5)
    redis_client.xadd(run.keys.policy, {Field.MANIFEST: msgspec.json.encode(manifest)}, id="5-1")
    for number in range(7):
        beat(redis_client, run, f"p{number}", 3, f"host-{number % 6}")
    beat(redis_client, run, "late", 1, "far\x1b[2J")
    redis_client.set(run.keys.producer("new"), b"{}", ex=60)
    found = run.json(capsys, "weights", "test")
    zero, one, *_, three, _, _ = found["policies"]
    assert (zero["num_changed"], zero["store"], zero["parent_version"]) == (None, str(folder), -1)
    assert (one["num_changed"], one["num_elements"], one["dense_bytes"], one["store"]) == (10, 1000, 4000, "redis")
    assert one["chunk_bytes"] < 400 < zero["chunk_bytes"] and [one["num_steps"], three["num_steps"]] == [2, 2]
    assert found["newest_time_s"] == 1.5 and found["newest_bytes"] > anchor.chunk_bytes
    newest, old = found["holders"]
    assert newest["hosts"]["host-0"] == 2 and (old["producers"], old["lag"]) == (["late"], 2)
    out = run.command(capsys, "weights", "test")[1].replace(str(folder), "FOLDER")
    for pattern, said in VARYING.items():
        out = re.sub(pattern, said, out)
    lines = (" ".join(line.split()) for line in out.splitlines())
    assert [line for line in lines if line.strip("─")] == SHOWN.strip().splitlines()


def test_a_policy_to_which_no_anchor_leads_is_named(run, redis_client, capsys):
    log = written(redis_client, run)
    log.drop(0, 1)
    found = run.json(capsys, "weights", "test")
    assert (found["newest_steps"], [each["num_steps"] for each in found["policies"]]) == (None, [None, None])
    assert "joining  not possible: no anchor leads to" in run.command(capsys, "weights", "test")[1]


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
