"""The record of a run of the demo that was killed and resumed reproduces the run's losses."""

import json

import pytest

from demo_run import DemoRun
from penstock.schemas.record import sampled_tokens
from penstock.schemas.record_reader import Record

pytestmark = [pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_record_of_a_killed_and_resumed_demo_gives_its_losses_again(resumed_run: DemoRun) -> None:
    num_updates = resumed_run.read("summary.json")["num_updates"]
    record = Record(resumed_run.folder)
    # At least three updates followed the checkpoint; the last one's record may have been incomplete.
    assert len(record.undone) >= 2 and record.missing == []
    heads = [record.head(at) for at in record.batches]
    assert [head.update for head in heads] == list(range(1, num_updates + 1))
    indexes = [group.entry.index for group in record.groups()]
    ledger = resumed_run.read("trainer.json")
    assert len(set(indexes)) == len(indexes) == ledger["num_groups_trained"] + ledger["num_groups_skipped"]
    trained = [group for group in record.groups() if group.entry.outcome == "trained"]
    assert len(trained) == ledger["num_groups_trained"]
    gaps = []
    for group in trained[:100]:
        recorded = record.group(group)
        (rollout, *_), ((findings, *_), *_) = recorded.decode().rollouts, recorded.findings
        tokens = list(sampled_tokens(rollout.segments[0], findings))
        # A token sampled after an update in its row saw keys and values of older weights.
        if all(token.lag == 0 for token in tokens):
            gaps += [
                abs(token.proximal_logprob - token.behavior_logprob)
                for token in tokens
                if token.proximal_logprob is not None
            ]
    assert gaps and max(gaps) < 1e-4, "in a row at lag 0 the trainer finds what the engine found"

    replayed = resumed_run.ask("replay", resumed_run.name, "--name", "own")
    assert f"bit for bit, at all {num_updates} updates" in replayed
    lines = [json.loads(line) for line in (resumed_run.folder / "replay/own/updates.jsonl").read_text().splitlines()]
    own = {line["update"]: line["loss"] for line in lines if line["variant"] == "own"}
    written = {line["update"]: line["loss"] for line in resumed_run.updates()}
    assert own == written, "the last line of an update is that of the line that survived"
