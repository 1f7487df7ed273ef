"""The parity check on the real vLLM: it names each injected fault, and finds none without one.

Here are the faults of an engine; those of its record are in `tests/consumers/parity/test_faults.py`, on computed rows.
"""

import pytest
import pytest_asyncio

import probed_engine
from parity_faults import LabelsOnly, bfloat16_head
from penstock.consumers.parity.layer_verdict import with_layers
from penstock.consumers.parity.tolerance import TOLERANCES
from penstock.producers.rollout.probe import batch_dependence
from penstock.schemas.rollout import (
    RolloutGroup,
)
from probed_engine import PROMPTS, ProbedEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

NUDGE = 0.02
"""The relative change of the weights from one policy to the next."""
LONG_PROMPTS = [[(7 * n + p) % 50 + 3 for n in range(200)] for p in (0, 5)]
"""Prompts of several blocks of the KV cache."""
CHUNK = 128
"""The tokens that an engine computes in a step: a long prompt takes several, and an update may fall between them."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def changeable(vllm_engine, tmp_path_factory):
    """A float32 engine, eager so that a layer can be changed while it runs, with prefix caching salted by version."""
    from faulty_worker import FaultyWorker
    from penstock.producers.engines import vllm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "EngineReport", FaultyWorker)
        probed = await probed_engine.start(
            vllm_engine,
            tmp_path_factory.mktemp("faulty"),
            tied=False,
            eager=True,
            prefix_caching=True,
            args={"max_num_batched_tokens": CHUNK},
        )
    yield probed
    await probed.engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def faulty(changeable: ProbedEngine) -> ProbedEngine:
    """The same engine with a new policy, independent of the test before."""
    await changeable.load(changeable.policy(nudge=NUDGE))
    return changeable


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def half_head(vllm_engine, tmp_path_factory):
    probed = await probed_engine.start(
        vllm_engine, tmp_path_factory.mktemp("head"), tied=True, dtype="bfloat16", head_dtype="model"
    )
    yield probed
    await probed.engine.close()


SHAPES = [("float32", True), ("bfloat16", False)]
"""Each dtype and each kind of head; `changeable` is the other float32 model."""


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=SHAPES, ids=lambda shape: f"{shape[0]}-{'un' * (not shape[1])}tied"
)
async def sound(vllm_engine, tmp_path_factory, request):
    """The parity recipe as engines run it: compiled."""
    dtype, tied = request.param
    probed = await probed_engine.start(
        vllm_engine,
        tmp_path_factory.mktemp("sound"),
        tied=tied,
        dtype=dtype,
        args={"max_num_batched_tokens": CHUNK},
    )
    yield probed
    await probed.engine.close()


def named(report, cause: str) -> str:
    """Checks that the verdict is a mismatch by `cause`; returns its sentence."""
    print(report.verdict.sentence)
    for each in report.hypotheses:
        print(f"  {each.name:18} {each.gap.mean:.2e} {each.gap.p99:.2e} {each.gap.max:.2e} {each.note}")
    assert (report.verdict.status, report.verdict.cause) == ("mismatch", cause), report.verdict
    return report.verdict.sentence


def num_mixed(groups: list[RolloutGroup]) -> int:
    return sum(len(rollout.segments[0].version_spans) > 1 for group in groups for rollout in group.rollouts)


async def met_in_flight(probed: ProbedEngine, *nudges: float, base=None, **sampling) -> list[RolloutGroup]:
    """Returns groups of which some were in flight at an update; tries again if it fell between two requests."""
    for _ in range(10):
        groups = await probed.sample([probed.policy(base, nudge=nudge) for nudge in nudges], **sampling)
        if num_mixed(groups) >= 8:
            return groups
    pytest.fail("no update met 8 rows in flight in 10 tries")


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_nothing_is_found_where_nothing_is_wrong(sound: ProbedEngine, seed):
    base = sound.model(seed)
    await sound.load(sound.policy(base))
    groups = await met_in_flight(sound, NUDGE, 2 * NUDGE, base=base, temperature=(1.0, 0.7, 1.3)[seed - 1])
    report = sound.check(groups)
    report = with_layers(report, await sound.layers())
    print(report.verdict.sentence)
    for layer in report.layers:
        print(f"  {layer.name} {layer.error:.1e}")
    assert (report.verdict.status, report.verdict.cause) == ("parity", "parity"), report.verdict
    assert report.num_tokens == sum(r.num_sampled_tokens for g in groups for r in g.rollouts)


@pytest.mark.exhaustive
async def test_an_engine_that_caches_prefixes_by_version_is_in_parity(faulty: ProbedEngine):
    # More requests than run at once: some wait under one policy and are prefilled under the next.
    groups = await met_in_flight(faulty, NUDGE, 2 * NUDGE, 3 * NUDGE, prompts=list(LONG_PROMPTS) * 8)
    report = faulty.check(groups)
    assert report.verdict.status == "parity", report


async def test_an_update_between_two_chunks_of_a_prompt_restarts_the_prompt(sound: ProbedEngine, monkeypatch):
    from penstock.producers.engines.update import UPDATE

    restarted: list[int] = []
    core = sound.engine._llm.engine_core
    call = core.call_utility_async

    async def recorded(name, *arguments):
        found = await call(name, *arguments)
        if name == UPDATE:
            restarted.append(found[1])
        return found

    monkeypatch.setattr(core, "call_utility_async", recorded)
    groups = []
    for _ in range(5):
        updates = [sound.policy(nudge=n * NUDGE) for n in (1, 2, 3)]
        groups += await sound.sample(updates, prompts=LONG_PROMPTS * 4, max_tokens=48)
        if any(restarted):
            break
    assert any(restarted), "no update met half a prompt in 15"
    report = sound.check(groups)
    assert report.verdict.status == "parity", report


@pytest.mark.exhaustive
async def test_top_p_without_the_mask_is_named(faulty: ProbedEngine):
    named(faulty.check(await faulty.sample(top_p=0.9)), "kept-support")


async def test_an_update_that_moved_the_label_only_is_named_at_either_precision(sound: ProbedEngine):
    await sound.load(sound.policy())
    skipped = sound.policy(nudge=0.2)
    try:
        groups = await sound.sample([skipped], engine=LabelsOnly(sound.engine))
        named(sound.check(groups), "weights-1")
    finally:
        await sound.load(sound.policy())


@pytest.mark.exhaustive
async def test_cached_prefixes_of_older_weights_are_named(faulty: ProbedEngine, monkeypatch):
    monkeypatch.setattr(faulty.engine, "_salted", False)
    await faulty.sample(prompts=LONG_PROMPTS)
    groups = await faulty.sample([faulty.policy(nudge=NUDGE)], prompts=LONG_PROMPTS)
    named(faulty.check(groups), "stale-prefix")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("method", "arguments", "layer"),
    [
        ("penstock_break_rope", (1, 4.0), "layers.1.attention"),
        ("penstock_break_norm", (0, "input_layernorm", 1e-3), "layers.0.attention"),
        ("penstock_break_norm", (1, "post_attention_layernorm", 1e-3), "layers.1.mlp"),
    ],
    ids=["rope", "epsilon before attention", "epsilon before mlp"],
)
async def test_a_layer_with_another_rope_or_norm_epsilon_is_named(faulty: ProbedEngine, method, arguments, layer):
    rpc = faulty.engine._llm.collective_rpc
    await rpc(method, args=arguments)
    try:
        report = faulty.check(await faulty.sample())
        print(report.verdict.sentence)
        report = with_layers(report, await faulty.layers())
    finally:
        await rpc("penstock_repair")
    assert named(report, "layer").startswith(layer)
    off = [each.name for each in report.layers if each.error > each.allowed]
    assert off == [layer], "no other layer is blamed"


@pytest.mark.exhaustive
async def test_a_bfloat16_head_in_the_engine_only_is_named(half_head: ProbedEngine):
    report = half_head.check(await half_head.sample())
    named(report, "engine-head")
    off = [each.name for each in await half_head.layers() if each.error > each.allowed]
    assert off == ["head"]


async def test_a_bfloat16_head_in_the_trainer_only_is_named(sound: ProbedEngine, monkeypatch):
    groups = await sound.sample()
    monkeypatch.setattr("penstock.consumers.learning.loss.scoring.selected_logprobs", bfloat16_head)
    named(sound.check(groups), "trainer-head")


async def test_batch_size_is_reported_as_the_engine_s_own_noise(sound: ProbedEngine):
    found = await batch_dependence(sound.engine, probed_engine.posed())
    print(found)
    assert found.num_texts == len(PROMPTS)
    assert found.num_tokens > 64
    if sound.config.model.dtype == "float32":
        assert found.max <= 1e-4
        assert found.num_parted == 0
    else:
        assert found.mean <= TOLERANCES["bfloat16"].mean
