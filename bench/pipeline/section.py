"""The pipeline section: cost and benefit of streaming, in-flight updates and asynchrony."""

import msgspec

from bench.pipeline.modes import mode_figures
from bench.pipeline.saving import GROUPS, SavingJob
from bench.pipeline.streaming import Load, StreamingSettings
from bench.result import Figure
from bench.running import demo_config, random_model, save_config
from bench.section import Bench, BenchSection, host_folder, measure_apart, redis_server

NUM_TOKENS = 1024
"""Of each rollout whose progress is saved: no end of sequence ends one earlier."""
NUM_LAYERS = 12
"""Of its model: 1,024 tokens take it about as long as they take a real model; the demo's takes 5 s."""


class PipelineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Durations and repetitions. The defaults take about twenty minutes on two quiet cores."""

    streaming_rounds: int = 3
    streaming_window_s: float = 8.0
    updates_per_s: tuple[float, ...] = (0.5, 3.5)
    """The goal is set for the first; the second is the demo's."""
    rate_limit_s: float = 30.0
    learning_limit_s: float = 100.0
    """Seconds of training for a run of the modes; those that learn end earlier once they have reached the accuracy."""
    saving_s: float = 30.0


def measure_streaming(bench: Bench) -> list[Figure]:
    """Measures a producer's engine with prompts, appends and updates, against the same engine without them."""
    model = random_model(bench, "streaming")
    config = demo_config("streaming", model)
    settings = StreamingSettings(
        run_file=save_config(bench, config),
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
    return stream(bench, settings)


def stream(bench: Bench, settings: StreamingSettings) -> list[Figure]:
    with redis_server(bench.folder / "redis", maxmemory_mb=8000) as server:
        url = {"REDIS_URL": server.url}
        figures: list[Figure] = measure_apart(
            "streaming", "bench.pipeline.streaming:measure_streaming", settings, list[Figure], bench.folder,
            environment=url,
        )  # fmt: skip
    return figures


def measure_saving(bench: Bench) -> list[Figure]:
    """Measures what saving the progress of long rollouts costs a producer that nothing disturbs."""
    model = random_model(bench, "saving", max_tokens=2 * NUM_TOKENS, num_layers=NUM_LAYERS)
    with redis_server(bench.folder / "redis") as server, host_folder("saving") as folder:
        overrides = (
            f"sampling.max_tokens={NUM_TOKENS}",
            f"engine.max_model_len={NUM_TOKENS + 64}",
            f"producers.groups_in_flight={GROUPS}",
            f'weights.host_folder="{folder}"',
        )
        config = demo_config("saving", model, *overrides)
        job = SavingJob(
            run_file=save_config(bench, config),
            runs=str(bench.folder / "runs"),
            seconds=bench.settings.saving_s,
        )
        url = {"REDIS_URL": server.url}
        part = "bench.pipeline.saving:measure_saving"
        return [measure_apart("saving", part, job, Figure, bench.folder, environment=url)]


PIPELINE = BenchSection(
    "pipeline",
    {
        "streaming": measure_streaming,
        "modes": mode_figures,
        "saving": measure_saving,
    },
    PipelineSettings(),
    quick=PipelineSettings(
        streaming_rounds=1,
        streaming_window_s=3.0,
        rate_limit_s=6.0,
        learning_limit_s=12.0,
        saving_s=1.0,
    ),
)
