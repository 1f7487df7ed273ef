"""`penstock weights`: the policies in a run's weight log, and the producers that hold each."""

from collections import Counter
from pathlib import Path

import msgspec
from msgspec.structs import replace

from penstock.deploy.launch.command_line import DEFAULT_RUNS
from penstock.deploy.operate.producer_list import Alive, Producers, producers_of
from penstock.deploy.operate.run_access import OpenRun, open_run
from penstock.schemas.config import ConfigError
from penstock.schemas.policy import WeightManifest
from penstock.schemas.weights.log import VersionGoneError, WeightLog, read_log
from penstock.schemas.weights.stores import ChunkStoreError, open_store


class LoggedPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One manifest.

    announced: it is on the policy stream. anchor: it is whole, and a reader without a policy may begin with it.
    delta_of: None of a whole policy. num_changed: elements that the delta changes; None of a whole policy.
    num_steps: manifests that a reader without a policy applies to get this one; None if nothing leads to it.
    time_s: None if the manifest has no time.
    """

    version: int
    parent_version: int
    announced: bool
    anchor: bool
    delta_of: int | None
    num_changed: int | None
    num_elements: int
    chunk_bytes: int
    dense_bytes: int
    num_steps: int | None
    store: str
    time_s: float | None


class StoreContent(msgspec.Struct, frozen=True, kw_only=True):
    """The chunks of one store that manifests name.

    num_missing: how many of them the store lacks. num_unnamed: other chunks in the store: of a policy that is being
        published, or left by a trainer that died. Both are None if the store cannot be read; `problem` says why.
    """

    place: str
    num_chunks: int
    num_bytes: int
    num_missing: int | None = None
    num_unnamed: int | None = None
    problem: str = ""


class PolicyHolders(msgspec.Struct, frozen=True, kw_only=True):
    """The producers that sample with one version, and their number by host. lag: as that of `Alive`."""

    version: int
    lag: int | None
    producers: tuple[str, ...]
    hosts: dict[str, int]


class LogContent(msgspec.Struct, frozen=True, kw_only=True):
    """newest_steps, newest_bytes: what a reader without a policy fetches for the newest; None if nothing leads to it.

    num_unreadable: producers whose heartbeat is of another release. unreadable: entries that are no manifests.
    """

    run: str
    finished: bool
    newest_version: int
    newest_time_s: float | None
    newest_steps: int | None
    newest_bytes: int | None
    policies: tuple[LoggedPolicy, ...]
    stores: tuple[StoreContent, ...]
    holders: tuple[PolicyHolders, ...]
    num_unreadable: int
    unreadable: tuple[str, ...]


def list_weights(run: str | Path, *, runs: str | Path = DEFAULT_RUNS) -> LogContent:
    """Lists the policies in a run's weight log, and the producers that hold each. Raises ConfigError if no policy can
    be read."""
    with open_run(run, runs) as opened:
        return _list_weights(opened)


def _list_weights(run: OpenRun) -> LogContent:
    log = read_log(run.redis, run.keys)
    newest = max(log.announced, default=None)
    if newest is None:
        why = "none has been announced yet, or Redis has lost them"
        raise ConfigError(f"run {run.name}: no policy on its policy stream: {'; '.join(log.unreadable) or why}")
    producers = producers_of(run)
    way = _way(log, newest)
    return LogContent(
        run=run.name,
        finished=producers.finished,
        newest_version=newest,
        newest_time_s=log.announced[newest].created_s or None,
        newest_steps=len(way) if way is not None else None,
        newest_bytes=sum(manifest.chunk_bytes for manifest in way) if way is not None else None,
        policies=tuple(_policy(log, manifest) for manifest in _manifests(log)),
        stores=_stores(run, log),
        holders=_holders(producers),
        num_unreadable=len(producers.unreadable),
        unreadable=log.unreadable,
    )


def _manifests(log: WeightLog) -> list[WeightManifest]:
    """Lists the manifests by version, of one version its anchor before its delta."""
    found = []
    for version in sorted({*log.announced, *log.anchors}):
        announced, anchor = log.announced.get(version), log.anchors.get(version)
        found += [anchor] if anchor is not None else []
        found += [announced] if announced is not None and (anchor is None or announced.delta_of is not None) else []
    return found


def _policy(log: WeightLog, manifest: WeightManifest) -> LoggedPolicy:
    announced, way = log.announced.get(manifest.version), _way(log, manifest.version)
    return LoggedPolicy(
        version=manifest.version,
        parent_version=manifest.parent_version,
        announced=announced is not None and announced.delta_of == manifest.delta_of,
        anchor=manifest.version in log.anchors and manifest.delta_of is None,
        delta_of=manifest.delta_of,
        num_changed=manifest.num_changed if manifest.delta_of is not None else None,
        num_elements=manifest.num_elements,
        chunk_bytes=manifest.chunk_bytes,
        dense_bytes=manifest.total_bytes,
        num_steps=len(way) if way is not None else None,
        store=manifest.store,
        time_s=manifest.created_s or None,
    )


def _way(log: WeightLog, version: int) -> list[WeightManifest] | None:
    try:
        return log.chain(version)
    except VersionGoneError:
        return None


def _stores(run: OpenRun, log: WeightLog) -> tuple[StoreContent, ...]:
    """Compares each store's chunks with the log, read again afterwards: a chunk that was dropped meanwhile is not
    missing."""
    found = []
    for place, chunks in _chunks(log).items():
        content = StoreContent(place=place, num_chunks=len(chunks), num_bytes=sum(chunks.values()))
        try:
            keys = set(open_store(place, run.keys, lambda command: command(run.redis)).keys())
        except (ChunkStoreError, ConfigError) as error:
            found.append(replace(content, problem=str(error)))
            continue
        still = _chunks(read_log(run.redis, run.keys)).get(place, {})
        missing, unnamed = (chunks.keys() & still.keys()) - keys, keys - chunks.keys() - still.keys()
        found.append(replace(content, num_missing=len(missing), num_unnamed=len(unnamed)))
    return tuple(found)


def _chunks(log: WeightLog) -> dict[str, dict[str, int]]:
    """Returns, by store, the bytes of each chunk that manifests name."""
    found: dict[str, dict[str, int]] = {}
    for manifest in (*log.announced.values(), *log.anchors.values()):
        found.setdefault(manifest.store, {}).update((chunk.key, chunk.num_bytes) for chunk in manifest.chunks)
    return found


def _holders(producers: Producers) -> tuple[PolicyHolders, ...]:
    """Groups the producers by version, the newest first."""
    by_version: dict[int, list[Alive]] = {}
    for each in producers.alive:
        by_version.setdefault(each.policy_version, []).append(each)
    return tuple(
        PolicyHolders(
            version=version,
            lag=holders[0].lag,
            producers=tuple(each.producer_id for each in holders),
            hosts=dict(Counter(each.host for each in holders).most_common()),
        )
        for version, holders in sorted(by_version.items(), reverse=True)
    )
