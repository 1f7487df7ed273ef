"""The fault suite's own ledger: what it counts, and what it refuses to count."""

import json
from unittest import mock

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from mini_producer import make_group
from penstock.consumers.learning.batch.packing import pack
from penstock.consumers.learning.batch.sharing import Sharing
from penstock.deploy.demo.make_model import build_tokenizer
from penstock.schemas.config import EnvironmentConfig, ModelConfig, RunConfig
from penstock.schemas.rollout import Rollout, RolloutGroup, Segment, VersionSpan, pack_floats, pack_ids
from tests.chaos.environment import text_of
from tests.chaos.witness import (
    ChainError,
    StepChain,
    digest,
    digest_of_base,
    digest_of_checkpoint,
    observed_learner,
    rows_in,
)
from training_groups import configuration, lag_from, random_group, tiny_model

BASE, A, B, C = "0", "a", "b", "c"


@pytest.fixture
def chain(tmp_path):
    def make(text: str) -> StepChain:
        (tmp_path / "steps").write_text(text)
        return StepChain(tmp_path / "steps", BASE)

    return make


def test_the_history_of_a_policy_is_every_step_from_the_base_model_to_it(chain):
    assert chain("0 a 1,2\na b 3\nb c 4,5\n").history(C) == [(1, 2), (3,), (4, 5)]
    rolled_back = chain("0 a 1,2\na b 3\na c 4\n")
    assert rolled_back.history(C) == [(1, 2), (4,)] and rolled_back.num_steps == 3
    assert chain("0 a 1,2\na b 1,3\n").history(B) == [(1, 2), (1, 3)], "an index that is trained again is there twice"
    assert chain("0 a 1\n0 a 1\n").history(A) == [(1,)], "the same step of two trainers is one"


def test_what_is_no_chain_of_steps_is_refused(chain):
    for text, problem in (
        ("a b 1\n", "1 steps back are weights a that no step has made"),
        ("0 a 1,2\na b", "torn"),
        ("0 b 1\na b 2\n", "made from"),
    ):
        with pytest.raises(ChainError, match=problem):
            chain(text).history(B)


def test_a_digest_tells_weights_and_moments_of_one_another():
    one, zero = torch.ones(2), torch.zeros(2)
    found = {
        digest({"masters/w": one}),
        digest({"masters/w": one, "exp_avg/w": zero}),
        digest({"masters/w": zero, "exp_avg/w": zero}),
        digest({"masters/w": one, "exp_avg/w": one}),
    }
    assert len(found) == 4
    assert digest({"masters/w": torch.ones(2)}) in found


@pytest.mark.parametrize("tied", [True, False])
def test_the_files_of_a_checkpoint_are_what_the_last_step_has_made(tmp_path, tied):
    tiny_model(tmp_path / "base", tied=tied)
    learner = observed_learner(tmp_path / "steps")(configuration(tmp_path / "base"))
    before = learner.weights_digest()
    assert digest_of_base(tmp_path / "base") == before
    with mock.patch("tests.chaos.witness.rows_in", lambda batch: [1, 1]):
        learner.step(pack([random_group(1, 0)], lag_from(7), learner.config))
    learner.begin_checkpoint(tmp_path / "tensors").result()
    assert digest_of_checkpoint(tmp_path) == learner.weights_digest() != before


PARTS = ({"w": torch.arange(3.0), "step": torch.tensor(1.0)}, {"w": torch.arange(3.0, 5.0)})


def save_parts(folder, starts: tuple[int, ...], parts=PARTS) -> None:
    """Writes a checkpoint's tensors as several ranks do; their parts of `w` begin at the rows `starts`."""
    (folder / "tensors").mkdir(parents=True)
    for rank, (start, part) in enumerate(zip(starts, parts, strict=True)):
        places = {name: {"saved_offsets": [start] if name == "w" else []} for name in part}
        save_file(part, folder / "tensors" / f"rank-{rank}.safetensors", {"DCP_SHARDING_INFO": json.dumps(places)})


def test_a_checkpoint_of_two_ranks_is_digested_as_the_whole_it_is_of_and_no_whole_is_refused(tmp_path):
    whole = digest({"w": torch.arange(5.0), "step": torch.tensor(1.0)})
    save_parts(tmp_path / "two", (0, 3))
    save_parts(tmp_path / "swapped", (2, 0), (*PARTS[:1], {"w": torch.arange(3.0, 5.0)}))
    assert digest_of_checkpoint(tmp_path / "two") == whole != digest_of_checkpoint(tmp_path / "swapped")
    for n, starts in enumerate(((0, 2), (0, 4), (1, 4), (0, 0))):
        save_parts(tmp_path / str(n), starts)
        with pytest.raises(ChainError, match="w: a part begins at row"):
            digest_of_checkpoint(tmp_path / str(n))


def group_about(index: int, *, claims_to_be: int, rewards: tuple[float, float] = (0.0, 1.0)) -> RolloutGroup:
    """Returns the prompt of `index` with completions `=1` and `=2`, in a group that names another index."""
    tokenizer = build_tokenizer(64)
    context = tokenizer.encode(text_of(index))
    group = make_group(claims_to_be, 0, rewards=rewards)
    rollouts = []
    for n, rollout in enumerate(group.rollouts, 1):
        sampled = tokenizer.encode(f"={n}")
        end = len(context) + len(sampled)
        segment = Segment(
            token_ids=pack_ids([*context, *sampled]),
            behavior_logprobs=pack_floats([-1.0] * len(sampled)),
            loss_mask=((len(context), end),),
            version_spans=(VersionSpan(0, len(context), end),),
        )
        rollouts.append(Rollout(segments=(segment,), reward=rollout.reward))
    return msgspec.structs.replace(group, rollouts=tuple(rollouts))


def test_indexes_are_read_from_the_tokens_of_every_rank_and_not_from_what_a_record_says():
    config = RunConfig(name="test", model=ModelConfig(path="none"), environment=EnvironmentConfig(path="none:None"))
    groups = [group_about(index, claims_to_be=n) for n, index in enumerate((7, 123, 9), 1)]
    flat = group_about(11, claims_to_be=4, rewards=(1.0, 1.0))
    assert rows_in(pack([*groups[:2], flat], lambda version: 0, config)) == [7, 7, 123, 123], "one without variance"
    batch = pack(groups, lambda version: 0, config, sharing=Sharing(2))
    by_rank = [rows_in(batch.of_rank(rank, 2)) for rank in (0, 1)]
    assert sorted(by_rank[0] + by_rank[1]) == [7, 7, 9, 9, 123, 123] and all(by_rank)
    assert rows_in(idle := pack(groups[:1], lambda version: 0, config, sharing=Sharing(4)).of_rank(3, 4)) == []
    assert idle.microbatches[0].is_idle
