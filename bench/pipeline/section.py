"""The pipeline section: cost and benefit of streaming, in-flight updates and asynchrony."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from bench.pipeline.fill import WORKLOADS, fill_figures
from bench.pipeline.kills import GROUPS, NUM_LAYERS, NUM_TOKENS, Killed, KillJob, kill_figures
from bench.pipeline.modes import ACCURACY, ModeRun, mode_breakdowns, rate_figure, run_mode, time_figure
from bench.pipeline.records import record_figures
from bench.pipeline.streaming import Load, Streamed, StreamingSettings
from bench.result import Breakdown, Figure, Goal, compare
from bench.section import Bench, BenchSection, host_folder, make_model, measure_apart, redis_server, run_file_model
from penstock.deploy.launch.run_folder import resolved_toml
from penstock.schemas.config import RunConfig, load_config

EVALUATE_EVERY = 5
"""Updates between evaluations while the time to an accuracy is measured; they bound its resolution."""
NEVER = 10**9
STREAMING = "bench.pipeline.streaming:measure_streaming"


class PipelineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Durations and repetitions. The defaults take about twenty minutes on two quiet cores."""

    streaming_rounds: int = 3
    streaming_window_s: float = 8.0
    updates_per_s: tuple[float, ...] = (0.5, 3.5)
    """The goal is set for the first; the second is the demo's."""
    rate_limit_s: float = 30.0
    learning_limit_s: float = 100.0
    """Seconds of training for a run of the modes; those that learn end earlier once they have reached the accuracy."""
    fill_seeds: tuple[int, ...] = (1, 2, 3)
    kills: int = 1
    saving_spells: int = 6
    saving_spell_s: float = 5.0
    saving_length_s: float = 15.0


QUICK = PipelineSettings(
    streaming_rounds=1,
    streaming_window_s=3.0,
    rate_limit_s=6.0,
    learning_limit_s=12.0,
    fill_seeds=(1,),
    saving_spells=1,
    saving_length_s=1.0,
)
"""Shows that everything runs. Its figures mean nothing."""


def measure_streaming(bench: Bench) -> list[Figure | Breakdown]:
    """Measures a producer's engine with prompts, appends and updates, against the same engine without them."""
    model = random_model(bench, "streaming")
    config = run_config(bench, "streaming", model)
    settings = StreamingSettings(
        run_file=str(save(bench, config)),
        runs=str(bench.folder / "runs"),
        loads=(
            # Ends by chance: a random model says <eos> once in some 98 tokens.
            Load(name="long completions", max_tokens=256, ramp_s=3.0, margin_s=2.5),
            # The length of the demo's answers: three digits and <eos>.
            Load(name="demo's completions", max_tokens=4, ramp_s=1.5, margin_s=0.3),
        ),
        updates_per_s=bench.settings.updates_per_s,
        rounds=bench.settings.streaming_rounds,
        window_s=bench.settings.streaming_window_s,
    )
    with redis_server(bench.folder / "redis") as server:
        url = {"REDIS_URL": server.url}
        found = measure_apart("streaming", STREAMING, settings, list[Streamed], bench.folder, environment=url)
    goal_rate = bench.settings.updates_per_s[0]
    return [figure for streamed in found for figure in streaming_figures(streamed, goal_rate)]


def measure_modes(bench: Bench) -> list[Figure | Breakdown]:
    """Measures runs of both modes: with a policy that does not change, for rates; then learning, for the time it
    takes."""
    model = run_file_model(bench)
    breakdowns: list[Figure | Breakdown] = []
    fixed: dict[str, ModeRun] = {}
    learning: dict[str, ModeRun] = {}
    for mode in ("asynchronous", "synchronous"):
        # So small a learning rate moves no weight: every update meets the same work.
        still = ("trainer.learning_rate=1e-12", f"evaluation.every={NEVER}")
        config = _mode_config(bench, mode, model, "fixed", *still)
        fixed[mode] = run_mode(config, bench.folder / "runs", limit_s=bench.settings.rate_limit_s)
        breakdowns += mode_breakdowns(mode, fixed[mode])
    rate = rate_figure(fixed["asynchronous"], fixed["synchronous"], config)
    for mode in fixed:
        config = _mode_config(bench, mode, model, "learning", f"evaluation.every={EVALUATE_EVERY}")
        limit_s = bench.settings.learning_limit_s
        learning[mode] = run_mode(config, bench.folder / "runs", limit_s=limit_s, accuracy=ACCURACY)
    return [rate, time_figure(learning["asynchronous"], learning["synchronous"]), *breakdowns]


def measure_fill(bench: Bench) -> list[Figure | Breakdown]:
    """Measures runs that learn with both ways to fill a batch, in turn for each seed."""
    model, figures = run_file_model(bench), []
    for workload, overrides in WORKLOADS.items():
        runs: dict[str, list[ModeRun]] = {"with_variance": [], "any": []}
        for seed in bench.settings.fill_seeds:
            for fill, found in runs.items():
                own = (f"batch.fill={fill}", f"seed={seed}", f"evaluation.every={EVALUATE_EVERY}", *overrides)
                name = f"{fill.replace('_', '-')}-{seed}-{list(WORKLOADS).index(workload)}"
                config = _mode_config(bench, "asynchronous", model, name, *own)
                limit_s = bench.settings.learning_limit_s
                found.append(run_mode(config, bench.folder / "runs", limit_s=limit_s, accuracy=ACCURACY))
        figures += fill_figures(workload, config, runs["with_variance"], runs["any"])
    return figures


def measure_kills(bench: Bench) -> list[Figure | Breakdown]:
    """Measures producers killed halfway through their rollouts, with saved progress and without, and the cost of
    saving."""
    model = random_model(bench, "kills", max_tokens=2 * NUM_TOKENS, num_layers=NUM_LAYERS)
    own = {
        "sampling.max_tokens": NUM_TOKENS,
        "engine.max_model_len": NUM_TOKENS + 64,
        "producers.groups_in_flight": GROUPS,
        "producers.claim_idle_s": 1.0,
        "producers.claim_refresh_s": 0.25,
    }
    with redis_server(bench.folder / "redis") as server, host_folder("kills") as folder:
        overrides = [f"{name}={value}" for name, value in own.items()]
        config = run_config(bench, "kills", model, *overrides, f'weights.host_folder="{folder}"')
        job = KillJob(
            run_file=str(save(bench, config)),
            runs=str(bench.folder / "runs"),
            kills=bench.settings.kills,
            spells=bench.settings.saving_spells,
            spell_s=bench.settings.saving_spell_s,
            length_s=bench.settings.saving_length_s,
        )
        url = {"REDIS_URL": server.url}
        found = measure_apart("kills", "bench.pipeline.kill_part:measure", job, Killed, bench.folder, environment=url)
    return [*kill_figures(found)]


def _mode_config(bench: Bench, mode: str, model: Path, what: str, *overrides: str) -> RunConfig:
    own = (f"mode={mode}", "producers.count=1", "producers.num_threads=1", "trainer.num_threads=1")
    return run_config(bench, f"{mode}-{what}", model, *own, *overrides)


def run_config(bench: Bench, name: str, model: Path, *overrides: str) -> RunConfig:
    return load_config(bench.run_file, [f"name={name}", f'model.path="{model}"', "metrics.port=0", *overrides])


def save(bench: Bench, config: RunConfig) -> Path:
    file = bench.folder / f"{config.name}.toml"
    file.write_text(resolved_toml(config))
    return file


def random_model(bench: Bench, name: str, **recipe: int) -> Path:
    folder = bench.folder / f"model-{name}"
    make_model(folder, train=False, **recipe)
    return folder


def streaming_figures(streamed: Streamed, goal_rate: float) -> Iterator[Figure]:
    """Compares tokens/s, with a goal at one rate of updates, and the share of time paused at each."""
    where = f"{streamed.load}, {streamed.updates_per_s:g} updates/s"
    yield compare(
        f"producer tokens/s, {where}",
        unit="/s",
        measured=streamed.tokens_per_s,
        reference=streamed.bare_tokens_per_s,
        reference_is="bare AsyncLLM in the same process: no Redis, no updates",
        goal=Goal(at_least=0.97) if streamed.updates_per_s == goal_rate else None,
        ratio=streamed.ratio,
        details=msgspec.to_builtins(streamed),
    )
    yield compare(f"share of time paused, {where}", unit="%", measured=streamed.paused_share * 100)


PIPELINE = BenchSection(
    "pipeline",
    {
        "records": lambda bench: record_figures(),
        "streaming": measure_streaming,
        "modes": measure_modes,
        "fill": measure_fill,
        "kills": measure_kills,
    },
    PipelineSettings(),
    QUICK,
    uses_run_file=True,
)
