"""Score centering: the formula over whole vocabularies in float64, its identities, and the way of its inputs."""

import dataclasses
import math

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from objective_cases import changed, packed_inputs, selected
from penstock.consumers.learning.batch.trainable import check_trainable
from penstock.consumers.learning.interfaces import LossInputs, check_objective
from penstock.consumers.learning.learner.learner import Learner
from penstock.consumers.learning.model import head_kernels
from penstock.consumers.learning.model.head import OutputHead, further_logprobs, selected_logprobs
from penstock.consumers.learning.objectives.grpo import Grpo
from penstock.consumers.learning.objectives.score_centering import ScoreCentering
from penstock.schemas.config import ConfigError, CorrectionConfig, Plug, SamplingConfig
from penstock.schemas.rollout import RecordError, pack_floats, unpack_ids
from training_groups import VOCABULARY, configuration, gradients_of, lag_from, random_groups, tiny_model, with_top

PATH = "penstock.consumers.learning.objectives.score_centering:ScoreCentering"
V, M = 7, 10


def distributions(seed: int, num: int = M) -> Tensor:
    return torch.log_softmax(2 * torch.randn(num, V, generator=torch.Generator().manual_seed(seed)).double(), 1)


def inputs_of(logits: Tensor, sampler: Tensor, tokens: Tensor, k: int) -> LossInputs:
    """Inputs of tokens [M], with the sampler's k likeliest ids; logits and its logprobs are [M, V]."""
    current, top = torch.log_softmax(logits, 1), sampler.topk(k, 1)
    return changed(
        packed_inputs(0),
        current_logprobs=current.gather(1, tokens[:, None])[:, 0],
        behavior_logprobs=sampler.gather(1, tokens[:, None])[:, 0],
        importance_weights=torch.ones(M).double(),
        top_current_logprobs=current.gather(1, top.indices),
        top_behavior_logprobs=top.values,
    )


def gradient(objective, logits: Tensor, sampler: Tensor, tokens: Tensor, k: int, **changes) -> Tensor:
    leaf = logits.clone().requires_grad_()
    objective(changed(inputs_of(leaf, sampler, tokens, k), **changes)).loss.backward()
    assert leaf.grad is not None
    return leaf.grad


def expected(logits: Tensor, sampler: Tensor, k: int, low: float, high: float, advantages: Tensor) -> list[Tensor]:
    """The gradient by the logits for each token that may have been sampled: token by token, over the whole vocabulary,
    with the sampler's tail in proportion to the policy's."""
    found = torch.zeros(V, M, V, dtype=torch.float64)
    for m in range(M):
        p, q = logits[m].softmax(0), sampler[m].exp()
        outside = torch.ones(V, dtype=torch.bool).scatter(0, q.topk(k).indices, False)
        modelled = q.clone()
        if outside.any():
            modelled[outside] = p[outside] * q[outside].sum() / p[outside].sum()
        scores = torch.eye(V, dtype=torch.float64) - p  # row v: grad of log p_v by the logits
        mean = sum(modelled[v] * (p[v] / modelled[v]).clamp(low, high) * scores[v] for v in range(V))
        for y in range(V):
            found[y, m] = -advantages[m] * ((p[y] / q[y]).clamp(low, high) * scores[y] - mean)
    return list(found)


@pytest.mark.parametrize("bounds", [(1.0, 1.0), (0.0, 2.0), (0.5, 1.25)])
@pytest.mark.parametrize("k", [1, 3, V])
def test_it_is_the_formula_over_the_whole_vocabulary(k, bounds) -> None:
    logits, sampler = distributions(1), distributions(2)
    objective = ScoreCentering(weight_low=bounds[0], weight_high=bounds[1])
    advantages, denominator = packed_inputs(0).advantages, packed_inputs(0).denominator
    for y, wanted in enumerate(expected(logits, sampler, k, *bounds, advantages)):
        found = gradient(objective, logits, sampler, torch.full((M,), y), k)
        torch.testing.assert_close(found * denominator, wanted, rtol=1e-9, atol=1e-12)


def test_no_drift_is_left_under_the_sampler_and_none_is_added_where_there_is_none() -> None:
    logits, sampler = distributions(3), distributions(4)
    one = torch.ones(M).double()

    def mean(objective, sampled_by: Tensor, k: int) -> Tensor:
        each = [gradient(objective, logits, sampled_by, torch.full((M,), y), k, advantages=one) for y in range(V)]
        return torch.stack([sampled_by[:, y, None].exp() * each[y] for y in range(V)]).sum(0)

    for objective in (ScoreCentering(), ScoreCentering(weight_low=0.0, weight_high=1.5)):
        assert mean(objective, sampler, V).abs().max() < 1e-12
        assert mean(objective, sampler, 1).abs().max() > 1e-3, "one id leaves what the tail's shape makes"
    # The sampler's tail is the policy's times a factor: few ids are all that is needed.
    p = logits.exp()
    likely = torch.zeros_like(p).scatter(1, p.argmax(1, True), 1.0)
    tilted = torch.log(0.5 * likely + 0.5 * p)
    assert mean(ScoreCentering(), tilted, 1).abs().max() < 1e-12
    # Where sampler and policy agree, and with weights that are never clipped, the sum is 0: REINFORCE.
    for k, sampled_by, objective in [
        (2, logits, ScoreCentering()),
        (V, sampler, ScoreCentering(weight_low=0.0, weight_high=1e9)),
    ]:
        tokens = torch.arange(M) % V
        found = gradient(objective, logits, sampled_by, tokens, k)
        scores = torch.nn.functional.one_hot(tokens, V) - p
        weights = (p / sampled_by.exp()).gather(1, tokens[:, None])
        wanted = -packed_inputs(0).advantages[:, None] * weights * scores / packed_inputs(0).denominator
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-10)


def test_what_is_masked_has_a_gradient_of_0_whatever_it_holds_and_parts_add_up() -> None:
    tokens, mask = torch.arange(M) % V, torch.arange(M) % 3 > 0
    plain = inputs_of(distributions(5), distributions(6), tokens, 3)
    names = ("current_logprobs", "behavior_logprobs", "top_current_logprobs", "top_behavior_logprobs", "advantages")
    results = []
    for poison in (0.25, math.nan, math.inf):
        values = {name: getattr(plain, name).detach().clone() for name in names}
        for value in values.values():
            value[~mask] = poison
        leaves = [values[name].requires_grad_() for name in ("current_logprobs", "top_current_logprobs")]
        result = ScoreCentering()(changed(plain, loss_mask=mask, **values))
        result.loss.backward()
        assert not any(leaf.grad[~mask].any() for leaf in leaves) and all(leaf.grad[mask].all() for leaf in leaves)
        results.append((result.loss.detach(), result.metrics["sampler_tail"], *(leaf.grad for leaf in leaves)))
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))
    parts = [ScoreCentering()(selected(plain, part)).loss for part in (torch.arange(4), torch.arange(4, M))]
    torch.testing.assert_close(parts[0] + parts[1], ScoreCentering()(plain).loss)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_further_ids_have_the_logprobs_and_gradients_of_a_softmax(monkeypatch, softcap) -> None:
    monkeypatch.setattr(head_kernels, "CHOSEN_ELEMENTS", 40)  # two tokens at a time
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 5, generator=generator).double().requires_grad_() for n in (M, V))
    targets, ids = (torch.randint(V, shape, generator=generator) for shape in ((M,), (M, 3)))
    temperature = torch.tensor([0.5, 1.0, 0.0, 2.0, 1.5] * 2).double()
    mixing = torch.randn(M, 3, generator=generator).double()
    own, _ = selected_logprobs(hidden, weight, targets, temperature, softcap=softcap)
    found = further_logprobs(hidden, OutputHead(weight, softcap), targets, temperature, own, ids)
    logits = hidden @ weight.T
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    wanted = torch.log_softmax(logits / torch.where(temperature == 0, 1.0, temperature)[:, None], 1).gather(1, ids)
    torch.testing.assert_close(found, wanted)
    both = [torch.autograd.grad((each * mixing).sum(), (hidden, weight)) for each in (found, wanted)]
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


def test_the_objective_gets_each_token_s_own_likeliest_ids(tmp_path) -> None:
    model, k = tiny_model(tmp_path).double(), 4
    settings = {"sampling": SamplingConfig(top_logprobs=k), "correction": CorrectionConfig(mode="none")}
    learner = Learner(configuration(tmp_path, objective=Plug(path=PATH), **settings))
    groups = [with_top(group, k) for group in random_groups(3)]
    taken, seen = gradients_of(learner), []
    learner.scorer.objective = lambda inputs: seen.append(inputs) or ScoreCentering()(inputs)  # type: ignore[assignment]
    batch = learner.pack(groups, lag_from(7))
    learner.step(batch)
    segments = {(group.index, r): one.segments[0] for group in groups for r, one in enumerate(group.rollouts)}
    (places,) = batch.minibatches[0].places
    for row, place in enumerate(places):
        segment = segments[place.group, place.rollout]
        check_trainable(groups[place.group - 1], VOCABULARY, top_logprobs=k)
        ids = torch.tensor(unpack_ids(segment.token_ids).tolist())
        at = torch.tensor([place for start, end in segment.loss_mask for place in range(start, end)])
        wanted = torch.log_softmax(model(input_ids=ids[None]).logits[0][at - 1], 1)
        top = torch.tensor(unpack_ids(segment.top_logprobs.ids).tolist()).view(-1, k)
        own = seen[0].row_ids == row
        torch.testing.assert_close(
            seen[0].top_current_logprobs[own].double(), wanted.gather(1, top), rtol=1e-5, atol=1e-5
        )
        assert pack_floats(seen[0].top_behavior_logprobs[own].flatten().tolist()) == segment.top_logprobs.logprobs
    assert taken and all(gradient.any() for gradient in taken[0].values())


def test_what_does_not_fit_is_refused_by_name(tmp_path) -> None:
    config = configuration(tmp_path, correction=CorrectionConfig(mode="none"))
    asked = replace(config, sampling=SamplingConfig(top_logprobs=3))
    check_objective(asked, ScoreCentering())
    for refused, objective, expects in [
        (config, ScoreCentering(), r"top_logprobs = 0 .*reads the likeliest ids; expected 1 or more"),
        (asked, Grpo(), r"top_logprobs = 3 .*does not read them; expected 0"),
    ]:
        with pytest.raises(ConfigError, match=expects):
            check_objective(refused, objective)
    (group,) = random_groups(1)
    for given, expects in [(group, "0 likeliest"), (with_top(group, 2), "2 likeliest")]:
        with pytest.raises(RecordError, match=rf"group 1: {expects} ids with each sampled token, expected .* = 3"):
            check_trainable(given, VOCABULARY, top_logprobs=3)
    with pytest.raises(RecordError, match="token id 22, expected less than the model's vocabulary of 22"):
        check_trainable(with_top(group, VOCABULARY), VOCABULARY - 1)
    with pytest.raises(ValueError, match="weight_low is 3, expected at most weight_high = 2"):
        ScoreCentering(weight_low=3, weight_high=2)
    without = dataclasses.replace(packed_inputs(0), top_current_logprobs=None)
    with pytest.raises(ValueError, match=r"expected rollouts that were recorded with sampling\.top_logprobs"):
        ScoreCentering()(without)
