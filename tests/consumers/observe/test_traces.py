"""Traces of a real run over HTTP: every trained group has a complete one whoever is killed, and it adds up."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from collector import Collector, KeptSpan
from forked_programs import PYTHONPATH, ForkedProgram
from mini_producer import dead_fields, group_fields
from penstock.consumers.observe.traces import PHASES, GroupTraces
from penstock.consumers.observe.tracing import Tracing
from penstock.schemas.config import EnvironmentConfig, MetricsConfig, ModelConfig, RunConfig
from penstock.schemas.keys import Field
from penstock.schemas.spans import BATCH, QUEUE, REWARD, ROOT, SAMPLE, STREAM, SYNC, TRAIN
from trainer_bench import TrainerBench
from trainer_process import TrainerProcesses, with_learner
from waiting import wait_for

pytestmark = [pytest.mark.redis, pytest.mark.timeout(600)]

INSTANCE = "service.instance.id"
TILES = (QUEUE, SAMPLE, REWARD, STREAM, BATCH, TRAIN)
TURNS, TOOLS, SIBLINGS = 3, 2, 2
LEARNER = """
class Learner(ScriptedLearner):
    vocabulary = 10**6
    def step(self, batch):
        time.sleep(0.05)
        return super().step(batch)
"""
PRODUCER = """
import sys
from pathlib import Path
from agent_client import tool_user
from chat_templates import tokenizer_of
from scripted_engine import ScriptedEngine
from tag_parser import TagParser
import penstock.producers.__main__ as entry
from penstock.schemas.config import load_config
entry.load_tokenizer = lambda config: tokenizer_of("chatml")
entry.answer_parser = lambda config, tokenizer: TagParser()
tool = tool_user()
def script(ids, sibling):
    answer = tool(ids, sibling)
    known = max(n for n in range(len(answer)) if not n or ids[-n:] == answer[:n])  # a killed producer's, to be resumed
    return answer[known:]
async def start(config, *, seed):
    return ScriptedEngine(script=script, token_s=0.002, max_model_len=4096)
config = load_config(Path(sys.argv[1]), sys.argv[4:])
sys.exit(entry.main(config, runs=Path(sys.argv[2]), producer_id=sys.argv[3], engine_factory=start))
"""
OVERRIDES = [
    "num_updates=16", "metrics.traces=true", "environment.path=tool_caller:ChancyCaller", "endpoint.port=0",
    "sampling.max_tokens=200", "producers.claim_idle_s=1", "producers.progress_s=0.2", "evaluation.num_prompts=0",
]  # fmt: skip


@pytest.fixture
def produce(bench: TrainerBench) -> Iterator[Callable[[str], ForkedProgram]]:
    """Starts a producer of this name."""
    started: list[ForkedProgram] = []

    def start(name: str) -> ForkedProgram:
        variables = {**os.environ, "PYTHONPATH": PYTHONPATH, "REDIS_URL": bench.url, "PENSTOCK_LOG": "text"}
        arguments = [str(bench.file), str(bench.runs), name, *bench.overrides]
        started.append(ForkedProgram(PRODUCER, arguments, variables, bench.runs / f"{name}.log"))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def last_of(spans: list[KeptSpan]) -> dict[str, KeptSpan]:
    """The spans by name; of several, the one that ended last: a trace may have tries before."""
    return {span.name: span for span in sorted(spans, key=lambda span: span.end_s)}


def check_complete(spans: list[KeptSpan]) -> None:
    last, ids = last_of(spans), {span.id for span in spans}
    assert last.keys() >= {ROOT, *TILES, SYNC, "invoke_agent", "chat none", "execute_tool add"}, sorted(last)
    assert {span.parent for span in spans} <= {*ids, ""}
    rollouts = [span for span in spans if span.name == "invoke_agent" and span.parent == last[SAMPLE].id]
    assert len(rollouts) == SIBLINGS
    for rollout in rollouts:
        inside = Counter(span.name for span in spans if span.parent == rollout.id)
        assert inside == {"chat none": TURNS, "execute_tool add": TOOLS}
    tiles = [last[name] for name in (*TILES, SYNC)]
    assert all(one.end_s == pytest.approx(next_.start_s, abs=1e-5) for one, next_ in pairwise(tiles))
    total_s = sum(span.end_s - span.start_s for span in tiles)
    assert total_s == pytest.approx(last[ROOT].end_s - last[ROOT].start_s, rel=0.01)
    assert last[ROOT].attributes["penstock.outcome"] == "trained" and not last[ROOT].error


def test_a_group_that_is_not_trained_says_why_and_one_that_is_sampled_again_goes_on(bench, collector, caplog) -> None:
    first_time = set()

    def answer(index: int, version: int) -> dict:
        if index in (3, 9):
            return dead_fields(index, "reward: boom")
        is_stale = index % 5 == 0 and index not in first_time and not first_time.add(index)
        fields = group_fields(index, 0 if is_stale else version, rewards=(0.0, float(index % 7 > 0)))
        return fields | ({Field.SPANS: b"\x92"} if index == 4 else {})

    bench.overrides = ["metrics.traces=true"]
    bench.producer(answer)
    trainer = bench.trainer()
    assert trainer.run()
    trainer.close()
    roots = [span for span in collector.spans if span.name == ROOT]
    outcomes = {span.index: (span.attributes["penstock.outcome"], span.error) for span in roots}
    ledger = bench.ledger()
    assert len(roots) == len(outcomes) == sum(ledger[f"num_groups_{each}"] for each in ("trained", "skipped", "dead"))
    assert outcomes[3] == outcomes[9] == ("dead", "reward: boom")
    assert outcomes[4] == ("trained", "")
    assert "traces: group 4 has none of its producer's: spans: Input data was truncated" in caplog.text
    skipped = {index for index, (outcome, _) in outcomes.items() if outcome == "skipped"}
    assert skipped == {index for index in outcomes if index % 7 == 0} and len(skipped) == ledger["num_groups_skipped"]
    again = [span for span in collector.spans if span.attributes.get("penstock.outcome") == "stale"]
    assert len(again) == ledger["num_groups_released_again"]["stale"] > 0
    assert {span.index for span in again} <= outcomes.keys() and {span.name for span in again} == {STREAM}


def test_the_roots_of_a_checkpoint_are_handed_over_in_parts(collector, monkeypatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "512")
    config = RunConfig(
        name="test", model=ModelConfig(path="none"), environment=EnvironmentConfig(path="none:None"),
        metrics=MetricsConfig(traces=True),
    )  # fmt: skip
    traces = GroupTraces(Tracing(config), "run")
    for index in range(1_000):
        traces.ended("dead", index, None, 1.0, "reward: boom")
    traces.snapshot()
    traces.commit(0.0)
    assert Counter(span.name for span in collector.spans) == {STREAM: 1_000, ROOT: 1_000}
    traces.close()


def test_every_trained_group_has_a_whole_trace_though_producers_and_trainer_are_killed(
    bench: TrainerBench, processes: TrainerProcesses, produce, collector: Collector, redis_client
) -> None:
    bench.overrides = OVERRIDES
    updates = bench.folder / "updates.jsonl"

    def trained(number: int) -> bool:
        return updates.exists() and bool(lines := bench.lines("updates.jsonl")) and lines[-1]["update"] >= number

    def log() -> str:
        return "\n".join(file.read_text() for file in bench.runs.glob("*.log"))

    trainer = processes.start("trainer", program=with_learner(LEARNER))
    first, second = produce("producer-0"), produce("producer-1")
    wait_for(lambda: trained(3), process=trainer, log=log)
    first.send_signal(signal.SIGKILL)
    third = produce("producer-2")
    wait_for(lambda: trained(6), process=trainer, log=log)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    second.send_signal(signal.SIGKILL)
    resumed = processes.start("resumed", "--resume", program=with_learner(LEARNER))
    assert resumed.wait(240) == 0, log()
    assert third.wait(60) == 0, log()
    traces, indexes = collector.traces(), bench.saved_training(redis_client)
    assert len(indexes) == 16 * 4
    for index in indexes:
        check_complete(traces[index])
    assert {span.attributes[INSTANCE] for span in collector.spans} > {"trainer", "producer-2"}
    # The report's times are those of the traces.
    lines = {line["update"]: line for line in bench.lines("updates.jsonl")}
    for number, line in lines.items():
        batch = [
            last
            for spans in traces.values()
            if (last := last_of(spans))[TRAIN].attributes.get("rl.loop.iteration") == number
        ]
        for phase, name in zip(PHASES, TILES, strict=True):
            mean_s = sum(last[name].end_s - last[name].start_s for last in batch) / len(batch)
            assert mean_s == pytest.approx(line["group_s"][phase], rel=0.01, abs=1e-4), (number, phase)
        assert line["step_s"] == pytest.approx(line["group_s"]["step"], rel=0.01)
