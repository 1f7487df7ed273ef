"""Runs legs one after another and writes their results."""

import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from transformers import AutoTokenizer

from penstock.deploy.demo.make_model import ModelRecipe, make_model
from penstock.schemas.config import (
    CheckpointConfig,
    EngineConfig,
    EnvironmentConfig,
    EvaluationConfig,
    MetricsConfig,
    ModelConfig,
    ParityConfig,
    ProducersConfig,
    RedisConfig,
    RunConfig,
    SamplingConfig,
    TrainerConfig,
    WeightsConfig,
)
from real_server import installed_servers
from tests.chaos.hits import Hit
from tests.chaos.judge import ChaosVerdict, judge
from tests.chaos.leg import Leg
from tests.chaos.ranks import NUM_RANKS, of_ranks
from tests.chaos.supervisor import InjectedFault, Supervisor

FOREVER = 10**6
RECIPE = ModelRecipe(
    train=False, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1, max_tokens=512
)


class LegResult(msgspec.Struct, kw_only=True):
    leg: Leg
    server: str
    seconds: float
    faults: list[InjectedFault]
    verdict: ChaosVerdict
    ends: dict[str, int]
    """How often a process ended by itself with a line that gives the reason, by that line."""
    hits: list[Hit] = []
    """The ranks that were hit."""


class CampaignResults(msgspec.Struct, kw_only=True):
    date: str
    machine: str
    with_disk: bool
    legs: list[LegResult]


def campaign(legs: Sequence[Leg], out: Path, *, with_disk: bool) -> list[LegResult]:
    """Runs the legs; after each, writes the results so far to `results.json` in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    make_model(out / "model", RECIPE, progress=lambda line: None)
    # Transformers imports it on first use, which every child would repeat.
    AutoTokenizer.from_pretrained(out / "model", local_files_only=True)
    results = CampaignResults(date=time.strftime("%Y-%m-%d"), machine=_machine(), with_disk=with_disk, legs=[])
    for leg in legs:
        results.legs.append(_run(leg, out, with_disk=with_disk))
        (out / "results.json").write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    return results.legs


def _run(leg: Leg, out: Path, *, with_disk: bool) -> LegResult:
    folder = out / leg.name
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    say = _speaker(folder / "supervisor.log")
    servers = installed_servers()
    server = leg.server or sorted(servers)[leg.seed // 2 % len(servers)]
    trainers = "a trainer and one that stands by" if leg.with_standby else "one trainer"
    ranks = f" of {NUM_RANKS} ranks" if leg.with_ranks else ""
    say(f"{leg.name}: {server}, appendfsync {leg.appendfsync}, {trainers}{ranks}, {leg.num_faults} faults")
    began = time.monotonic()
    (folder / "host").mkdir()
    config = _config(leg, out / "model", folder)
    if leg.with_ranks:
        config = of_ranks(config, folder / "aims")
    supervisor = Supervisor(leg, config, folder, servers[server], with_disk=with_disk, say=say)
    try:
        supervisor.run()
        verdict = judge(supervisor)
        verdict.problems = supervisor.problems + verdict.problems
        if verdict.problems and with_disk:  # the small disk ends with the suite
            shutil.copytree(supervisor.run_folder / "checkpoints", folder / "checkpoints")
    finally:
        supervisor.close()
    seconds = time.monotonic() - began
    say(
        f"{leg.name}: {seconds:.0f} s, {len(supervisor.done)} faults, {verdict.num_epochs} trainers; released "
        f"{verdict.num_released}: {verdict.num_trained} trained, {verdict.num_skipped} skipped, {verdict.num_dead} "
        f"dead, {verdict.num_lost} lost, {verdict.num_trained_twice} trained twice; posed {verdict.num_generated} "
        f"times; {verdict.num_steps_in_policy} steps in the policy, {verdict.num_steps_undone} undone"
    )
    for problem in verdict.problems:
        say(f"{leg.name}: BROKEN: {problem}")
    if verdict.problems:
        say(f"{leg.name}: once more: python -m tests.chaos {leg.arguments}")
    return LegResult(
        leg=leg,
        server=server,
        seconds=round(seconds, 1),
        faults=supervisor.done,
        verdict=verdict,
        ends=dict(supervisor.ends),
        hits=supervisor.hits.done if supervisor.hits else [],
    )


def _config(leg: Leg, model: Path, folder: Path) -> RunConfig:
    """Returns a run without an end, with steps of milliseconds and claims that expire after a second."""
    return RunConfig(
        name="chaos",
        seed=leg.seed,
        num_updates=FOREVER,
        group_size=2,
        groups_per_batch=4,
        max_lag=2,
        model=ModelConfig(path=str(model)),
        environment=EnvironmentConfig(
            path="tests.chaos.environment:ChaosEnvironment", kwargs={"notes": str(folder / "notes")}
        ),
        sampling=SamplingConfig(max_tokens=4),
        engine=EngineConfig(max_model_len=64, kv_cache_gib=0.1),
        producers=ProducersConfig(
            count=3,
            groups_in_flight=8,
            claim_idle_s=1.0,
            max_attempts=16,
            progress_s=0.01,  # a completion takes 20 ms
        ),
        # A step this small changes few of the float32 elements: most policies are published as deltas.
        trainer=TrainerConfig(learning_rate=3e-10, device="cpu", lease_s=1.0),
        evaluation=EvaluationConfig(every=50, num_prompts=4),
        checkpoint=CheckpointConfig(every=5),
        redis=RedisConfig(outage_s=60.0),
        weights=WeightsConfig(host_folder=str(folder / "host")),
        metrics=MetricsConfig(port=0),
        parity=ParityConfig(gate="off"),  # scripted engines invent their logprobs
    )


def _speaker(log: Path) -> Callable[[str], None]:
    def say(text: str) -> None:
        print(text, flush=True)
        with log.open("a") as file:
            file.write(text + "\n")

    return say


def _machine() -> str:
    return f"{platform.system()} on {platform.machine()}, {len(os.sched_getaffinity(0))} cores"
