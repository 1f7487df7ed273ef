"""One bad producer among three, through a whole trainer that really computes, on a real server: for each of the ten
faults nothing of it is trained once it is found, and the others go on as if it were not there; so also where no row has
lag 0 and the trainer never waits."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_faults import FAULTS, SIBLINGS, label_late, labels_only, not_finite, raw
from faulty_producers import NAMES, FaultyProducers
from parity_bench import ParityBench
from penstock.consumers.parity.gate import ParityRefusedError
from penstock.consumers.parity.recheck import BUSY_SHARE, Recheck
from penstock.consumers.parity.watch import LIMIT, OUT
from penstock.consumers.trainer import Trainer
from penstock.schemas.keys import Field
from penstock.schemas.weights.reading import WeightReader
from real_server import installed_servers
from trainer_bench import TrainerBench

pytestmark = pytest.mark.redis

NUM_UPDATES = 8
MOST_TRAINED = 4
"""Groups of the bad producer, of which each batch has one."""


@pytest.fixture(scope="session")
def server_binary() -> Path:
    """One of the installed servers: what they answer alike is shown elsewhere."""
    installed = installed_servers()
    if not installed:
        pytest.skip("no Redis server is installed")
    return next(iter(installed.values()))


@pytest.fixture(scope="module")
def parity_bench(tmp_path_factory: pytest.TempPathFactory) -> ParityBench:
    return ParityBench.make(tmp_path_factory.mktemp("bench"))


@pytest.fixture
def computing(redis_url: str, tmp_path: Path, parity_bench: ParityBench) -> Iterator[TrainerBench]:
    """A run with a real learner; each batch has a group of each producer."""
    bench = TrainerBench(redis_url, tmp_path)
    bench.overrides = [
        f"model.path={parity_bench.folder}",
        "mode=synchronous",
        "parity.gate=refuse",
        "trainer.device=cpu",
        "trainer.learning_rate=1e-3",
        f"num_updates={NUM_UPDATES}",
        f"groups_per_batch={len(NAMES)}",
        f"group_size={SIBLINGS['float32']}",
        "evaluation.num_prompts=0",
    ]
    yield bench
    bench.close()


def trained_with(bench: TrainerBench, producers: FaultyProducers):
    """A trainer that has trained the whole run."""
    bench.producer(producers.answer)
    trainer = producers.watched(bench.trainer())
    if "parity.recheck=1.0" in bench.overrides:  # as if each batch were waited for
        read = trainer.intake.read
        trainer.intake.read = lambda: 0 if trainer.recheck._waiting else read()
    assert trainer.run()
    assert len(producers.batches) == bench.config.num_updates
    return trainer


def assert_undisturbed(bench: TrainerBench, producers: FaultyProducers) -> None:
    """Every group of the other producers is trained, once, and nothing else is lost."""
    trained = Counter(item for batch in producers.batches for item in batch.items())
    for name in ("good", "fine"):
        own = [(index, name) for index, names in producers.answered.items() if name in names]
        assert [trained[each] for each in own] == [1] * len(own), f"a group of {name} was dropped"
    outcomes = bench.ledger()["attrition"]["rollouts"]["main"]
    answered = sum(names.count("bad") for names in producers.answered.values())
    num = {name: sum(each["num"] for each in own.values()) for name, own in outcomes.items()}
    untrained = (answered - producers.num_trained("bad")) * SIBLINGS["float32"]
    assert num == {"trained": len(producers.batches) * len(NAMES) * SIBLINGS["float32"], "quarantined": untrained}


@pytest.mark.parametrize("fault", [*FAULTS, label_late], ids=lambda fault: fault.__name__)
def test_of_a_producer_that_turns_bad_nothing_is_trained_once_it_is_found(
    computing, parity_bench, redis_client, tmp_path, fault
):
    if fault is label_late:  # seen in no row of lag 0
        computing.overrides.append("parity.recheck=1.0")
    producers = FaultyProducers(parity_bench, redis_client, computing.keys, tmp_path / "policies", fault)
    trained_with(computing, producers)
    assert producers.found.keys() == {"bad"}, "no false quarantine"
    found, num_batches = producers.found["bad"]
    assert producers.num_trained("bad") - 1 == MOST_TRAINED, "the first batch has a group from before the fault"
    assert producers.num_trained("bad", after=num_batches) == 0 and num_batches < NUM_UPDATES
    assert found.cause == FAULTS.get(fault, "unexplained") and found.gap > 1e-5
    assert_undisturbed(computing, producers)


@pytest.mark.parametrize("since", [0, 1])
def test_a_producer_whose_rows_the_trainer_refuses_is_quarantined_by_its_fourth_group(
    computing, parity_bench, redis_client, tmp_path, since
):
    """Its weights are broken and it sends NaN: not one that is trained, but an index for good with each group."""
    producers = FaultyProducers(
        parity_bench, redis_client, computing.keys, tmp_path / "policies", not_finite, since=since
    )
    trained_with(computing, producers)
    found, num_batches = producers.found["bad"]
    assert producers.found.keys() == {"bad"} and num_batches < NUM_UPDATES
    assert producers.num_trained("bad") == since, "its group from before the fault"
    assert (found.cause, found.gap) == ("refused", pytest.approx(0, abs=1e-5) if since else None)
    letters = [fields for _, fields in redis_client.xrange(computing.keys.dead)]
    assert len(letters) < -(-LIMIT // OUT), "the group that it is found by is sampled again already"
    for letter in letters:
        assert letter[Field.PRODUCER] == b"bad" and b"not finite; sampled by instance of bad" in letter[Field.REASON]
        assert producers.answered[int(letter[Field.INDEX])] == ["bad"]
    first = letters[0][Field.REASON].decode()
    assert found.says == f"the trainer refuses its groups, the first one as {first}"
    ledger = computing.ledger()
    assert ledger["num_groups_dead"] == len(letters) and ledger["num_groups_trained"] == NUM_UPDATES * len(NAMES)
    assert ledger["num_groups_released"] == len(letters) + NUM_UPDATES * len(NAMES)
    assert ledger["num_groups_released_again"]["quarantined"] > 0
    trained = Counter(item for batch in producers.batches for item in batch.items())
    for index, names in producers.answered.items():
        if names[-1] != "bad":
            assert trained[index, names[-1]] == 1 and set(names[:-1]) <= {"bad"}, "a group of the others is lost"


def test_a_producer_that_is_bad_in_the_first_batch_is_quarantined_by_the_gate_and_the_run_begins_without_it(
    computing, parity_bench, redis_client, tmp_path
):
    producers = FaultyProducers(parity_bench, redis_client, computing.keys, tmp_path / "policies", raw, since=0)
    trained_with(computing, producers)
    found, num_batches = producers.found["bad"]
    assert set(producers.found) == {"bad"} and num_batches == producers.num_trained("bad") == 0
    assert (found.cause, found.num_rows) == ("raw", SIBLINGS["float32"])
    assert found.says.startswith("the parity gate: these are raw logprobs")
    assert_undisturbed(computing, producers)
    report = json.loads((computing.folder / "parity.json").read_text())
    assert (report["verdict"]["status"], report["num_groups"]) == ("parity", len(NAMES))


def test_a_bad_producer_that_fills_the_first_batch_alone_is_no_reason_to_refuse_a_run_that_has_others(
    computing, parity_bench, redis_client, tmp_path, beat
):
    first = ["bad"] * len(NAMES)
    producers = FaultyProducers(
        parity_bench, redis_client, computing.keys, tmp_path / "policies", raw, since=0, first=first
    )
    beat(computing.keys, "instance of bad")
    beat(computing.keys, "instance of good")
    trained_with(computing, producers)
    assert set(producers.found) == {"bad"} and producers.num_trained("bad") == 0
    assert_undisturbed(computing, producers)


def test_a_run_that_has_nobody_but_bad_producers_is_refused_with_what_the_gate_says(
    computing, parity_bench, redis_client, tmp_path, beat
):
    first = ["bad"] * len(NAMES)
    producers = FaultyProducers(
        parity_bench, redis_client, computing.keys, tmp_path / "policies", raw, since=0, first=first
    )
    beat(computing.keys, "instance of bad")
    with pytest.raises(ParityRefusedError, match=r'parity.gate = "refuse"\): these are raw logprobs'):
        trained_with(computing, producers)
    assert not producers.found and not producers.batches
    assert json.loads((computing.folder / "parity.json").read_text())["verdict"]["cause"] == "raw"


UPDATE_S, RECHECK_S, CREDIT_BATCHES = 1.0, 0.05, 3
LATEST = MOST_TRAINED * len(NAMES) * math.ceil(RECHECK_S / (BUSY_SHARE * UPDATE_S))
"""Updates until a producer is found all of whose groups are out: a turn in three, every second update."""


@pytest.fixture
def kept_full(computing) -> TrainerBench:
    """Every open prompt is answered before the next batch is taken, so that rows are two steps old then."""
    computing.overrides += ["mode=asynchronous", f"max_lag={CREDIT_BATCHES - 1}"]
    return computing


def never_waiting(bench: TrainerBench, trainer: Trainer) -> Trainer:
    """The trainer, to which its queue is always full; to its rechecks an update takes `UPDATE_S`, each of them
    `RECHECK_S`."""
    now_s = 0.0
    recheck = Recheck(
        bench.config, WeightReader(bench.connections[-1].call, bench.keys), bench.metrics.count_recheck, lambda: now_s
    )
    intake, step, gap = trainer.intake, trainer.learner.step, recheck._gap
    read, is_short = intake.read, intake.is_short

    def counted_step(batch):
        nonlocal now_s
        now_s += UPDATE_S
        return step(batch)

    def counted_gap(group):
        nonlocal now_s
        now_s += RECHECK_S
        return gap(group)

    trainer.recheck, trainer.learner.step, recheck._gap = recheck, counted_step, counted_gap
    intake.read = lambda: max(1, read())
    intake.is_short = lambda num_groups: is_short(num_groups) or intake.num_ready < intake.ledger.num_open
    return trainer


def test_a_bad_producer_is_found_at_lags_above_0_by_a_trainer_that_never_waits(
    kept_full, parity_bench, redis_client, tmp_path
):
    kept_full.overrides += ["parity.recheck=1.0", f"num_updates={2 * CREDIT_BATCHES + LATEST}"]
    producers = FaultyProducers(parity_bench, redis_client, kept_full.keys, tmp_path / "policies", labels_only)
    kept_full.producer(producers.answer)
    trainer = never_waiting(kept_full, producers.watched(kept_full.trainer()))
    assert trainer.run()
    assert producers.found.keys() == {"bad"}, "no false quarantine"
    found, num_batches = producers.found["bad"]
    assert CREDIT_BATCHES < num_batches <= CREDIT_BATCHES + LATEST, (
        "the fault begins in the batch behind the first three"
    )
    assert producers.num_trained("bad") == num_batches and producers.num_trained("bad", after=num_batches) == 0
    assert found.gap > 1e-5
    updates = kept_full.lines("updates.jsonl")
    assert all("0" not in update["lag_histogram"] for update in updates[1:])
    num_rechecked = kept_full.metrics.registry.get_sample_value(
        "penstock_parity_rechecks_total", {"outcome": "rechecked"}
    )
    assert num_rechecked * RECHECK_S <= BUSY_SHARE * UPDATE_S * len(updates) + RECHECK_S
    assert_undisturbed(kept_full, producers)


def test_losses_are_the_same_with_rechecks_between_updates(kept_full, parity_bench, redis_client, redis_url, tmp_path):
    def losses(bench: TrainerBench, folder: Path) -> list[float]:
        producers = FaultyProducers(parity_bench, redis_client, bench.keys, folder, labels_only, since=NUM_UPDATES)
        bench.producer(producers.answer)
        trainer = never_waiting(bench, producers.watched(bench.trainer()))
        assert trainer.run() and not producers.found
        return [update["loss"] for update in bench.lines("updates.jsonl")]

    without = losses(kept_full, tmp_path / "policies")
    kept_full.close()
    redis_client.flushall()
    (tmp_path / "again").mkdir()
    again = TrainerBench(redis_url, tmp_path / "again")
    again.overrides = [*kept_full.overrides, "parity.recheck=1.0"]
    try:
        assert losses(again, tmp_path / "again" / "policies") == without
        assert again.metrics.registry.get_sample_value("penstock_parity_rechecks_total", {"outcome": "rechecked"}) >= 2
    finally:
        again.close()
    assert len(set(without)) == NUM_UPDATES
