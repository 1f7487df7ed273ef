"""The host's copy of the policy: always bit for bit what was announced, or refused."""

import fcntl
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import fakeredis
import msgspec
import numpy as np
import pytest
from safetensors import deserialize

from penstock.producers.interfaces import WeightLoadError
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.weights import host_copy as module
from penstock.producers.weights import host_folder as folder_module
from penstock.producers.weights.host_copy import HostCopy
from penstock.producers.weights.host_folder import default_folder, folder_of_copies
from penstock.schemas.config import ConfigError
from penstock.schemas.keys import Keys
from penstock.schemas.policy import WeightManifest, make_version
from penstock.schemas.weights.reading import WeightReader
from penstock.schemas.weights.stores import ChunkStoreError, FolderChunks
from weight_writer import WeightWriter

KEYS = Keys("test")
SHAPES = {"embedding": (300, 40), "norm": (64,), "head": (500, 8)}

Policy = dict[str, np.ndarray]


def first_policy(seed: int = 0) -> Policy:
    draw = np.random.default_rng(seed)
    return {name: draw.integers(0, 2**32, shape, dtype=np.uint32) for name, shape in SHAPES.items()}


def stepped(policy: Policy, draw: random.Random, share: float = 0.01) -> Policy:
    """A policy of which a share of elements differs."""
    numbers = np.random.default_rng(draw.getrandbits(32))
    new = {name: bits.copy() for name, bits in policy.items()}
    for bits in new.values():
        hit = numbers.random(bits.shape) < share
        bits[hit] = numbers.integers(0, 2**32, int(hit.sum()), dtype=np.uint32)
    return new


def policy_in(data: bytes) -> Policy:
    """What an engine reads from a file."""
    return {
        name: np.frombuffer(tensor["data"], np.uint32).reshape(tensor["shape"]) for name, tensor in deserialize(data)
    }


def is_policy(policy: Policy, expected: Policy) -> bool:
    return policy.keys() == expected.keys() and all(np.array_equal(policy[name], expected[name]) for name in policy)


class ReportingCopy(HostCopy):
    """A copy, with its reader of the log and its metrics."""

    def __init__(self, folder: Path, client: fakeredis.FakeRedis) -> None:
        self.log_reader = WeightReader(lambda command: command(client), KEYS)
        self.reported = ProducerMetrics()
        super().__init__(str(folder), "test", "redis", self.log_reader, self.reported)

    def rebuilt(self, reason: str) -> float:
        name = "penstock_weight_copies_rebuilt_total"
        return self.reported.registry.get_sample_value(name, {"reason": reason}) or 0.0


class Host:
    """A log, and the producers of one host that read it."""

    def __init__(self, folder: Path, client: fakeredis.FakeRedis) -> None:
        self.folder, self.client = folder, client
        self.log = WeightWriter(client, piece=5000)
        self.copies: list[HostCopy] = []

    def producer(self) -> ReportingCopy:
        copy = ReportingCopy(self.folder, self.client)
        copy.open()
        self.copies.append(copy)
        return copy

    def step(self, draw: random.Random, share: float = 0.01) -> WeightManifest:
        """Announces the next version as a delta of the newest."""
        newest = max(self.log.policies)
        return self.log.delta(newest + 1, stepped(self.log.policies[newest], draw, share), of=newest)

    def load(self, copy: HostCopy, wanted: WeightManifest, *, exactly: bool = False) -> int:
        """Has a copy moved and loaded; the label is that of the published bits. Returns the label."""
        manifest = copy.lock_at(wanted, exactly=exactly)
        assert is_policy(policy_in(copy.path.read_bytes()), self.log.policies[manifest.version])
        copy.release()
        return manifest.version


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path, fakeredis.FakeRedis(protocol=2))
    yield made
    for copy in made.copies:
        copy.close()


@pytest.mark.parametrize("seed", range(2))
def test_a_random_walk_is_bit_for_bit_what_was_announced(host: Host, seed: int) -> None:
    draw = random.Random(seed)
    version, epoch = 0, 0
    manifests = {0: host.log.whole(0, first_policy(seed))}
    copies = [host.producer() for _ in range(2)]
    for _ in range(80):
        kind = draw.random()
        if kind < 0.06:  # a fork: another trainer goes on from an older policy, announced whole
            epoch += 1
            older = draw.choice(sorted(manifests))
            version = make_version(epoch, draw.randrange(3))
            manifests[version] = host.log.whole(version, host.log.policies[older], parent=older)
        else:
            share = 0.9 if kind < 0.12 else draw.choice([0.0, 0.0003, 0.01, 0.01, 0.3])
            bits = stepped(host.log.policies[version], draw, share)
            if kind < 0.12:
                manifests[version + 1] = host.log.whole(version + 1, bits)
            else:
                manifests[version + 1] = host.log.delta(version + 1, bits, of=version)
            version += 1
        if draw.random() < 0.1:
            host.log.anchor(version)
        if draw.random() < 0.4:
            continue  # skipped
        copy = draw.choice(copies)
        assert host.load(copy, manifests[version]) == version
        if draw.random() < 0.2:  # a failed load goes back
            older = draw.choice(sorted(manifests)[-5:])
            assert host.load(copy, manifests[older], exactly=True) == older
        if draw.random() < 0.1:
            (copy.folder / "state").unlink(missing_ok=True)


def test_producers_of_a_host_fetch_once_and_a_late_one_gets_what_the_copy_has_moved_on_to(host: Host) -> None:
    draw = random.Random(4)
    old = host.log.whole(0, first_policy())
    copies = [host.producer() for _ in range(4)]
    errors: list[BaseException] = []
    for _ in range(6):
        newest = host.step(draw)

        def load(copy: HostCopy, newest: WeightManifest = newest) -> None:
            try:
                host.load(copy, newest)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=load, args=(copy,)) for copy in copies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
    whole, *deltas = [host.log.manifests[version].chunk_bytes for version in range(7)]
    assert sum(copy.num_bytes for copy in copies) == whole + sum(deltas)
    late = host.producer()
    assert host.load(late, old) == 6 and late.num_bytes == 0
    resumed = make_version(1, 0)
    again = host.log.whole(resumed, host.log.policies[6], parent=6)
    assert host.load(late, again) == resumed and late.num_bytes == 0, "the same bits under another version"


def test_bytes_change_only_while_nobody_loads(host: Host) -> None:
    draw = random.Random(5)
    old = host.log.whole(0, first_policy())
    loading, patching = host.producer(), host.producer()
    loading.lock_at(old)
    new = host.step(draw)
    moving = threading.Thread(target=lambda: patching.lock_at(new))
    moving.start()
    while not patching.num_bytes:
        time.sleep(0.001)  # fetches beside the load
    time.sleep(0.05)
    assert is_policy(policy_in(loading.path.read_bytes()), host.log.policies[0])
    loading.release()
    moving.join()
    assert is_policy(policy_in(patching.path.read_bytes()), host.log.policies[1])


def test_another_run_under_the_same_name_does_not_pass_for_this_one(host: Host) -> None:
    draw = random.Random(7)
    host.log.whole(0, first_policy(0))
    copy = host.producer()
    for _ in range(3):
        newest = host.step(draw)
    host.load(copy, newest)
    for first in (2, 3):  # version 3 again with other bits; then a delta of a version that the copy only seems to hold
        host.client.flushall()
        host.log.policies.clear()
        host.log.whole(first, first_policy(first))
        assert host.load(copy, host.step(draw)) == first + 1
    assert copy.rebuilt("wrong") == 2


DAMAGES = {
    "missing": (lambda data: None, "has no chunk"),
    "cut short": (lambda data: data[:-1], "bytes, expected"),
    "flipped": (lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:], "XXH3 digest"),
}


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_a_bad_chunk_is_refused_by_name_and_passed_over_once_another_chain_leads_on(host: Host, share: float) -> None:
    draw = random.Random(8)
    host.log.whole(0, first_policy())
    copy = host.producer()
    for damage, message in DAMAGES.values():
        host.load(copy, host.step(draw))
        bad = host.step(draw, share)
        key = bad.chunks[1].key
        data = damage(host.client.hget(KEYS.chunks, key))
        host.client.hdel(KEYS.chunks, key)
        if data is not None:
            host.client.hset(KEYS.chunks, key, data)
        with pytest.raises((WeightLoadError, ChunkStoreError), match=message):
            copy.lock_at(bad)
        newest = host.step(draw)
        with pytest.raises((WeightLoadError, ChunkStoreError), match=key):
            copy.lock_at(newest)
        host.log.anchor(newest.version)
        assert host.load(copy, newest) == newest.version


def test_a_manifest_that_lies_is_refused(host: Host) -> None:
    draw = random.Random(9)
    host.log.whole(0, first_policy())
    copy = host.producer()
    old = host.step(draw)
    host.load(copy, old)
    new = host.step(draw)
    first, *others = new.chunks
    (piece,) = first.pieces
    shifted, foreign = (msgspec.structs.replace(piece, **change) for change in ({"start": 1}, {"digest": "0" * 32}))
    host.client.xdel(KEYS.policy, f"{new.version}-1")
    for lie in (
        {"chunks": (msgspec.structs.replace(first, pieces=(shifted,)), *others)},
        {"chunks": (msgspec.structs.replace(first, pieces=(foreign,)), *others)},
        {"chunks": (*new.chunks, first)},
        {"tensors": (*new.tensors[:-1], msgspec.structs.replace(new.tensors[-1], name="other"))},
    ):
        with pytest.raises(WeightLoadError, match=r"tensors|bits|kept no longer"):
            copy.lock_at(msgspec.structs.replace(new, **lie))
        assert host.load(copy, old, exactly=True) == old.version


def test_a_log_trimmed_under_a_reader_is_read_from_the_anchor_and_without_one_refused(host: Host) -> None:
    draw = random.Random(10)
    host.log.whole(0, first_policy())
    copy = host.producer()
    host.load(copy, host.step(draw))
    for _ in range(4):
        newest = host.step(draw)
    host.log.anchor(newest.version)
    read = copy.log_reader.log

    def trimmed_since() -> object:
        log = read()
        host.log.trim(newest.version)
        copy.log_reader.log = read
        return log

    copy.log_reader.log = trimmed_since
    assert host.load(copy, newest) == newest.version
    assert copy.rebuilt("behind") == 1
    host.client.hdel(KEYS.anchors, newest.version)
    for _ in range(2):
        newest = host.step(draw)
    host.log.trim(newest.version)
    with pytest.raises(WeightLoadError, match="its weights are kept no longer"):
        copy.lock_at(newest)


def test_a_torn_copy_is_built_anew(host: Host) -> None:
    newest = host.log.whole(0, first_policy())
    copy = host.producer()
    host.load(copy, newest)

    def overwrite(place: int, whence: int) -> None:
        with copy.path.open("r+b") as file:
            file.seek(place, whence)
            file.write(b"?")

    for tear in (
        lambda: os.truncate(copy.path, copy.path.stat().st_size - 4),
        lambda: copy.path.unlink(),
        lambda: (copy.folder / "state").write_bytes(b"{"),
        lambda: overwrite(9, os.SEEK_SET),  # in the header
    ):
        tear()
        assert host.load(copy, newest) == newest.version
    overwrite(-1, os.SEEK_END)
    newest = host.step(random.Random(12))
    assert host.load(copy, newest) == newest.version


def in_a_process(work: Callable[[], None]) -> int | None:
    """Runs `work` in a process of its own; returns its exit status."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    return process.exitcode


class KillAt:
    """Ends this process by SIGKILL at the n-th time it gets to a place."""

    def __init__(self, place: str, number: int) -> None:
        self.place, self.left = place, number

    def around(self, place: str, function: Callable) -> Callable:
        def run(*arguments: object, **named: object) -> object:
            self.left -= place == self.place
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        return run


@pytest.mark.parametrize("share", [0.01, 0.5])
@pytest.mark.parametrize(
    ("place", "number"), [("fetch", 1), ("lock", 1), ("apply", 1), ("apply", 3), ("verify", 2), ("clean", 1)]
)
def test_a_kill_in_the_middle_of_a_patch_never_leaves_wrong_bits(
    tmp_path: Path, place: str, number: int, share: float
) -> None:
    server = fakeredis.FakeServer()
    host = Host(tmp_path, fakeredis.FakeRedis(server=server, protocol=2))
    host.log = WeightWriter(host.client, piece=5000, store=FolderChunks(tmp_path / "chunks"))
    draw = random.Random(13)
    host.log.whole(0, first_policy())
    survivor = host.producer()
    host.load(survivor, host.step(draw))
    newest = host.step(draw, share)

    def die() -> None:
        kill = KillAt(place, number)
        copy = host.producer()
        copy._fetch = kill.around("fetch", copy._fetch)
        copy._set_state = kill.around("clean", copy._set_state)
        module.apply = kill.around("apply", module.apply)
        module.verify = kill.around("verify", module.verify)
        lock = copy._host.lock
        copy._host.lock = lambda name, **kind: (kill.around("lock", lock) if name == "read" else lock)(name, **kind)
        copy.lock_at(newest)
        os._exit(0)

    assert in_a_process(die) == -signal.SIGKILL
    assert host.load(survivor, newest) == newest.version
    assert survivor.rebuilt("dirty") == (place not in ("fetch", "lock") or (place == "fetch" and share == 0.5))
    survivor.close()
    assert not survivor.folder.exists()


def test_the_last_one_out_removes_the_folder_and_any_producer_sweeps_what_was_left(host: Host, tmp_path: Path) -> None:
    first, second = host.producer(), host.producer()
    assert first.folder.stat().st_mode & 0o777 == 0o700
    first.close()
    assert second.folder.is_dir()
    second.close()
    assert not second.folder.exists()

    def leave() -> None:
        reader = WeightReader(lambda command: command(host.client), Keys("other"))
        HostCopy(str(tmp_path), "other", "redis", reader, ProducerMetrics()).open()
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_process(leave) == -signal.SIGKILL
    assert len(list(tmp_path.glob("penstock-*-other-*"))) == 1
    third = host.producer()
    assert list(tmp_path.glob("penstock-*")) == [third.folder]


@pytest.mark.parametrize("moment", ["before its last look", "after it"])
def test_who_joins_while_the_last_one_removes_the_folder_loses_nothing(host: Host, monkeypatch, moment: str) -> None:
    manifest = host.log.whole(0, first_policy())
    leaving = host.producer()
    flock, remove, joined = fcntl.flock, shutil.rmtree, []

    def join() -> None:
        if not joined:
            joined.append(host.producer())
            host.load(joined[0], manifest)

    def replace_before(descriptor: int, kind: int) -> None:
        if kind == fcntl.LOCK_EX | fcntl.LOCK_NB:
            monkeypatch.setattr(fcntl, "flock", flock)
            leaving.folder.rename(leaving.folder.with_name("removed"))
            join()
        flock(descriptor, kind)

    def join_after(folder: Path, **named: object) -> None:
        join()
        remove(folder, **named)

    if moment == "after it":
        monkeypatch.setattr(shutil, "rmtree", join_after)
    else:
        monkeypatch.setattr(fcntl, "flock", replace_before)
    leaving.close()
    fetched = joined[0].num_bytes
    assert host.load(joined[0], manifest) == 0 and joined[0].num_bytes == fetched


def test_a_host_whose_lock_files_were_removed_does_not_fall_into_two(host):
    host.log.whole(1, first_policy())
    copies = [host.producer(), host.producer()]
    draw = random.Random(3)
    wanted = host.step(draw)
    assert {host.load(copy, wanted) for copy in copies} == {wanted.version}
    for name in ("users", "patch", "read"):
        (copies[0].folder / name).unlink()
    copies.append(host.producer())
    wanted = host.step(draw)
    assert {host.load(copy, wanted) for copy in copies} == {wanted.version}
    assert len({(copy.folder / "read").stat().st_ino for copy in copies}) == 1
    for copy in copies:
        copy.close()
    assert not copies[0].folder.exists()


def test_a_host_folder_that_cannot_be_used_is_named(host: Host, tmp_path: Path) -> None:
    assert folder_of_copies(None) == default_folder()
    folder, manifest = tmp_path / "copies", host.log.whole(0, first_policy())
    with pytest.raises(ConfigError, match=r"weights\.host_folder = '.*/copies': expected a folder"):
        ReportingCopy(folder, host.client)
    folder.mkdir()
    copy = ReportingCopy(folder, host.client)
    copy.folder.mkdir()
    copy.folder.chmod(0o777)
    with pytest.raises(ConfigError, match="expected a folder of this user, mode 0700"):
        copy.open()
    copy.folder.chmod(0o700)
    copy.open()
    copy.lock_at(manifest)
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=r"weights\.host_folder = '.*/copies': expected a folder"):
        copy.lock_at(manifest)
    folder.mkdir()
    copy.open()
    assert host.load(copy, manifest) == 0
    copy.close()


def test_without_room_the_folder_the_bytes_and_the_setting_are_named(host: Host, tmp_path: Path) -> None:
    manifest = host.log.whole(0, first_policy())

    def load_without_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        copy = host.producer()
        try:
            copy.lock_at(manifest)
        except WeightLoadError as error:
            (tmp_path / "error").write_text(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os._exit(host.load(copy, manifest))

    assert in_a_process(load_without_room) == 0
    message = rf"weights\.host_folder = '{tmp_path}': File too large: 64,\d+ bytes are needed, [\d,]+ are free"
    assert re.search(message, (tmp_path / "error").read_text())


def test_closing_ends_a_wait_for_another_producer(host: Host, monkeypatch) -> None:
    manifest = host.log.whole(0, first_policy())
    waiting = host.producer()
    errors: list[Exception] = []

    def wait() -> None:
        try:
            waiting.lock_at(manifest)
        except WeightLoadError as error:
            errors.append(error)

    waits, sleep = threading.Event(), time.sleep

    def sleep_and_tell(seconds: float) -> None:
        waits.set()
        sleep(seconds)

    monkeypatch.setattr(folder_module, "time", SimpleNamespace(sleep=sleep_and_tell, monotonic=time.monotonic))
    with (waiting.folder / "patch").open() as another:
        fcntl.flock(another, fcntl.LOCK_EX)
        thread = threading.Thread(target=wait)
        thread.start()
        assert waits.wait(60)
        waiting.close()
        thread.join()
    assert "stopped while it waited" in str(errors[0])


def test_a_store_that_is_slow_shows_how_far_the_fetching_is(host: Host, monkeypatch, caplog) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(module, "LONG_WAIT_S", 0.0)
    host.load(host.producer(), host.log.whole(7, first_policy()))
    assert "still fetching weights: chunk 2 of 5 of policy 7 in redis" in caplog.text
