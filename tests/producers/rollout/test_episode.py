"""From a claim to a group, or to a reason why there is none."""

import asyncio
import math
import time

import pytest
from msgspec import UNSET
from msgspec.structs import replace

import wire_examples
from penstock.consumers.learning.batch.trainable import check_trainable
from penstock.producers.interfaces import EngineError, RolloutFacts
from penstock.producers.rollout.episode import Episodes, load_tokenizer
from penstock.producers.rollout.rewards import component
from penstock.producers.rollout.run_environments import RunEnvironment, RunEnvironments
from penstock.producers.rollout.sampling import evaluation_sampling, training_sampling
from penstock.producers.rollout.teacher import TeacherError
from penstock.producers.stream.in_flight import Claim, Dead
from penstock.schemas.config import (
    ConfigError,
    EnvironmentConfig,
    EvaluationConfig,
    ModelConfig,
    ProducersConfig,
    RewardConfig,
    SamplingConfig,
)
from penstock.schemas.images import ImagePlace, digest_of
from penstock.schemas.policy import make_version
from penstock.schemas.prompt import Message, Prompt, Reward
from penstock.schemas.rollout import (
    RolloutGroup,
    SamplingSettings,
    VersionSpan,
    decode_group,
    died_of_length,
    encode_group,
    shown_traceback,
    unpack_ids,
)
from producer_run import ids
from scripted_engine import ScriptedEngine
from vision_models import picture
from waiting import until


class OneTask:
    """Poses one prompt; the reward is 1 for its answer."""

    num_evaluation_prompts = 4

    def __init__(self, prompt: Prompt | BaseException) -> None:
        self._prompt = prompt

    def prompt(self, index: int) -> Prompt:
        if isinstance(self._prompt, BaseException):
            raise self._prompt
        return self._prompt

    def evaluation_prompt(self, n: int) -> Prompt:
        return Prompt(text=f"held out {n}", answer="6")

    def reward(self, prompt: Prompt, completion: str) -> float | Reward:
        return float(completion == prompt.answer)


SUM = Prompt(text="12+34=", answer="46")


@pytest.fixture
def episodes(make_config, metrics, tmp_path):
    """`episodes(environment, engine, **config)`, with the test's tokenizer."""

    def build(environment=None, engine=None, reward=None, limits=None, teacher=None, **changes) -> Episodes:
        config = make_config(**{"group_size": 2, "reward": limits or RewardConfig(), **changes})
        environment = environment or OneTask(SUM)
        settings = config.environment
        source = RunEnvironment(
            name=settings.name,
            environment=environment,
            rewards=(component(reward or environment.reward),),
            sampling=training_sampling(config, settings),
            evaluation_sampling=evaluation_sampling(config, settings),
            num_samples=config.evaluation.num_samples,
        )
        return Episodes(
            config,
            producer_id="a",
            metrics=metrics,
            teacher=teacher,
            environments=RunEnvironments([source]),
            tokenizer=load_tokenizer(config),
            engine=engine or ScriptedEngine(),
        )

    return build


def claim(index: int = 7, **fields) -> Claim:
    return Claim(stream="prompts", entry_id=b"1-1", index=index, version=0, **fields)


def text_engine(*completions: str, **settings) -> ScriptedEngine:
    """Sibling s answers completions[s] and the end-of-sequence token."""
    return ScriptedEngine(script=lambda prompt, sibling: [*ids(completions[sibling]), 1], **settings)


async def test_a_group_holds_prompt_and_answers_as_the_engine_saw_them(episodes) -> None:
    started = time.time()
    group = await episodes(engine=text_engine("46", "5")).run(claim())
    assert isinstance(group, RolloutGroup)
    assert (group.index, group.prompt, group.producer_id, group.evaluation_id) == (7, SUM, "a", None)
    assert [rollout.reward.value for rollout in group.rollouts] == [1.0, 0.0]
    (right,), (wrong,) = (rollout.segments for rollout in group.rollouts)
    assert list(unpack_ids(right.token_ids)) == [*ids("12+34="), *ids("46"), 1]
    assert right.loss_mask == ((6, 9),) and right.version_spans == (VersionSpan(0, 6, 9),)
    assert right.num_sampled_tokens == 3 and wrong.num_sampled_tokens == 2
    assert started <= group.timings.generated_s <= group.timings.appended_s
    assert group.sampling == SamplingSettings()
    encode_group(group)


async def test_each_prompt_is_posed_and_limited_by_its_own_environment(make_config, metrics, tmp_path) -> None:
    settings = (
        EnvironmentConfig(path="a:B", name="sums", max_tokens=3),
        EnvironmentConfig(path="a:B", name="words"),
    )
    config = make_config(
        group_size=2,
        environment=None,
        environments=settings,
        sampling=SamplingConfig(temperature=0.5),
        evaluation=EvaluationConfig(max_tokens=5),
    )
    posing = {"sums": OneTask(SUM), "words": OneTask(Prompt(text="one", answer="5"))}
    episodes = Episodes(
        config,
        producer_id="a",
        metrics=metrics,
        environments=RunEnvironments(RunEnvironment.of(config, each, posing[each.name]) for each in settings),
        tokenizer=load_tokenizer(config),
        engine=text_engine("46", "5"),
    )
    sums = await episodes.run(claim(environment="sums", task=4))
    words = await episodes.run(claim(index=8, environment="words", task=4))
    assert (sums.environment, sums.task, sums.prompt) == ("sums", 4, SUM)
    assert sums.sampling == SamplingSettings(temperature=0.5, max_tokens=3)
    assert (words.environment, words.prompt.text, words.sampling.max_tokens) == ("words", "one", 256)
    assert [[each.reward.value for each in group.rollouts] for group in (sums, words)] == [[1, 0], [0, 1]]
    held_out = await episodes.run(claim(index=9, environment="words", task=2, evaluation_id="0-9"))
    assert (held_out.prompt.text, held_out.sampling.max_tokens, held_out.environment) == ("held out 2", 5, "words")
    gone = await episodes.run(claim(environment="verse"))
    assert gone.reason == "prompt: LookupError: environment 'verse' is not in the run file, which has sums, words"
    episodes.close()


async def test_the_ids_that_tokens_were_sampled_from_are_in_the_record(episodes) -> None:
    group = await episodes(sampling=SamplingConfig(top_k=3, top_p=0.9)).run(claim())
    assert isinstance(group, RolloutGroup)
    check_trainable(decode_group(encode_group(group)), vocabulary=64)
    for rollout in group.rollouts:
        (segment,) = rollout.segments
        assert segment.sampling_mask is not None
        sampled = unpack_ids(segment.token_ids)[6:]
        assert [list(unpack_ids(kept)) for kept in segment.sampling_mask] == [[n, n + 1, n + 2] for n in sampled]


async def test_an_evaluation_of_several_samples_is_sampled_as_it_asks(episodes) -> None:
    how = EvaluationConfig(num_samples=3, temperature=0.6, top_p=0.9, top_k=20, pass_at=(2,))
    group = await episodes(engine=text_engine("6", "5", "6"), evaluation=how).run(claim(index=3, evaluation_id="0-3"))
    assert (group.index, group.evaluation_id, group.prompt.text) == (0, "0-3", "held out 3")
    assert [rollout.reward.value for rollout in group.rollouts] == [1.0, 0.0, 1.0]
    assert group.sampling == SamplingSettings(temperature=0.6, top_p=0.9, top_k=20, max_tokens=256)
    encode_group(group)
    greedy = await episodes(engine=text_engine("6")).run(claim(index=3, evaluation_id="0-3"))
    assert greedy.sampling == SamplingSettings(temperature=0.0, max_tokens=256) and len(greedy.rollouts) == 1


async def test_a_synchronous_run_seeds_each_request_by_its_place_in_the_run(episodes) -> None:
    async def seeds(*claims: Claim, **changes) -> list[int | None]:
        engine = ScriptedEngine()
        built = episodes(engine=engine, **changes)
        for one in claims:
            await built.run(one)
        return engine.seeds

    places = [claim(7), claim(8), claim(7, attempt=2)]
    found = await seeds(*places, mode="synchronous")
    assert found == (await seeds(*places[::-1], mode="synchronous"))[::-1]
    assert len({*found, *await seeds(*places, mode="synchronous", seed=1)}) == 6
    assert all(seed is not None and 0 <= seed < 2**56 for seed in found)
    assert await seeds(claim(7)) == [None]


async def test_messages_go_through_the_chat_template_with_a_generation_prompt(episodes) -> None:
    prompt = Prompt(messages=(Message(role="user", content="1+1"),), answer="2")
    build = episodes(OneTask(prompt), text_engine("2", "3"))
    build._tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}a={% endif %}"
    )
    group = await build.run(claim())
    assert isinstance(group, RolloutGroup)
    (segment,) = group.rollouts[0].segments
    assert list(unpack_ids(segment.token_ids)) == [*ids("user 1+1 a="), *ids("2"), 1]


SEEING = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ 'z' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endfor %}"
)


def pictured(*files: bytes) -> Prompt:
    parts = [{"type": "text", "text": "1"}, *({"type": "image", "image": file} for file in files)]
    return Prompt(messages=(Message(role="user", content=parts),), answer="2")


async def test_the_images_of_a_prompt_are_placed_in_every_segment_and_kept_once(episodes) -> None:
    (mark,) = ids("z")
    wide, engine = picture(3, 1), text_engine("2", "3", image_token=mark)
    prompt = pictured(wire_examples.PNG, wide, wide)
    build = episodes(OneTask(prompt), engine)
    build._tokenizer.chat_template = SEEING
    group = await build.run(claim())
    assert isinstance(group, RolloutGroup)
    digests = [digest_of(wire_examples.PNG), digest_of(wide), digest_of(wide)]
    assert group.images == dict(zip(digests, [wire_examples.PNG, wide, wide], strict=True))
    assert [part.digest for part in group.prompt.images] == digests and group.prompt.images[0].data is UNSET
    places = tuple(ImagePlace(*place) for place in zip(digests, (1, 3, 6), (3, 6, 9), strict=True))
    for rollout in group.rollouts:
        (segment,) = rollout.segments
        assert segment.images == places and segment.loss_mask[0][0] == 9
        assert list(unpack_ids(segment.token_ids))[:9] == [*ids("1"), *[mark] * 8]
    assert [asked.places for asked in engine.images] == [places] and engine.images[0].files == group.images
    assert decode_group(encode_group(group)) == group


async def test_a_prompt_whose_images_cannot_be_given_is_dead(episodes) -> None:
    (mark,) = ids("z")
    for files, template, seeing, reason in [
        ([b"none"], SEEING, mark, "prompt: ImageError: 4 bytes that cannot be decoded"),
        ([wire_examples.PNG], SEEING, None, "prompt: ValueError: the prompt holds an image, expected text: the policy"),
        ([wire_examples.PNG], "1", mark, "prompt: ValueError: 1 images, expected none, or one for each placeholder"),
    ]:
        build = episodes(OneTask(pictured(*files)), text_engine("2", "3", image_token=seeing))
        build._tokenizer.chat_template = template
        outcome = await build.run(claim())
        assert isinstance(outcome, Dead) and outcome.reason.startswith(reason), outcome.reason
        assert outcome.group is not None and encode_group(outcome.group, dead=True)


async def test_a_prompt_that_cannot_be_posed_is_dead(episodes) -> None:
    for prompt, reason in [
        (KeyError("no such row"), "prompt: KeyError: 'no such row'"),
        (SystemExit(0), "prompt: SystemExit: 0"),
        (asyncio.CancelledError(), "prompt: CancelledError"),
        (Prompt(text=""), "prompt: no tokens, expected at least one"),
        (Prompt(text="1" * 40), "prompt: 40 tokens, expected fewer than the model's context of 40"),
        (Prompt(messages=(Message(role="user", content="hi"),)), "prompt: ValueError: Cannot use chat template"),
        ("12+34=", "prompt: TypeError: prompt(7) returned '12+34=', expected a Prompt"),
        (Prompt(text="12+34=", answer=46), "prompt: ValidationError: Expected `str`, got `int` - at `$.answer`"),
    ]:
        engine = ScriptedEngine(max_model_len=40)
        outcome = await episodes(OneTask(prompt), engine).run(claim())
        assert isinstance(outcome, Dead) and outcome.reason.startswith(reason), reason
        assert engine.requests == []


async def test_a_reward_is_told_lengths_limit_and_end_of_each_completion(episodes) -> None:
    told: list[RolloutFacts] = []

    def reward(prompt: Prompt, completions: list[str], facts: list[RolloutFacts]) -> list[float]:
        told.extend(facts)
        return [float(each.is_truncated) for each in facts]

    engine = text_engine("46", "4", max_model_len=10, finish_reasons={1: "length"})
    group = await episodes(engine=engine, reward=reward).run(claim())
    assert isinstance(group, RolloutGroup)
    assert told == [
        RolloutFacts(num_prompt_tokens=6, num_tokens=n, max_tokens=4, finish_reason=reason)
        for n, reason in ((3, "stop"), (2, "length"))
    ]
    assert [rollout.reward.value for rollout in group.rollouts] == [0.0, 1.0]


async def test_a_reward_that_raises_keeps_its_traceback_and_the_completions(episodes) -> None:
    def reward(prompt: Prompt, completion: str) -> float:
        return {"46": 1.0}[completion]

    outcome = await episodes(engine=text_engine("46", "5"), reward=reward).run(claim())
    assert isinstance(outcome, Dead) and outcome.reason == "reward: KeyError: '5'"
    trace = shown_traceback(outcome.error)
    assert 'return {"46": 1.0}[completion]' in trace and "while scoring the completion '5'" in trace
    group = outcome.group
    assert group is not None and (group.index, group.prompt, group.producer_id) == (7, SUM, "a")
    said = [list(unpack_ids(rollout.segments[0].token_ids))[6:] for rollout in group.rollouts]
    assert said == [[*ids("46"), 1], [*ids("5"), 1]]
    assert all(math.isnan(rollout.reward.value) for rollout in group.rollouts), "not a number that somebody may train"


async def test_generation_past_the_deadline_is_dead_and_the_request_is_aborted(episodes) -> None:
    engine = ScriptedEngine(hang_on_prompt=ids("12"))
    late = episodes(engine=engine, producers=ProducersConfig(generation_deadline_s=0.05))
    outcome = await late.run(claim())
    assert isinstance(outcome, Dead)
    assert outcome.reason == "deadline: not finished after 0.05 s (producers.generation_deadline_s)"
    assert died_of_length(outcome.reason)
    assert engine.num_active == 0 and len(engine.cancelled) == 1
    engine.is_frozen = True
    with pytest.raises(EngineError, match="is frozen"):  # no group's fault
        await late.run(claim(attempt=2))


async def test_what_the_engine_refuses_or_fails_at_is_dead(episodes) -> None:
    refused = await episodes(engine=ScriptedEngine(refuse_prompt=ids("12"))).run(claim())
    assert isinstance(refused, Dead) and refused.reason == "engine: ValueError: the scripted engine refuses this prompt"
    assert refused.group is not None and (refused.group.prompt, refused.group.rollouts) == (SUM, ())
    failed = await episodes(engine=ScriptedEngine(finish_reasons={1: "error"})).run(claim())
    assert isinstance(failed, Dead) and failed.reason == "engine: completion 1 finished with 'error'"
    with pytest.raises(EngineError, match="has died"):  # no group's fault
        await episodes(engine=ScriptedEngine(die_after=0)).run(claim())


def test_a_model_folder_without_a_tokenizer_is_refused(make_config, tmp_path) -> None:
    for folder, message in [
        (tmp_path / "none", "no such folder; expected a transformers model"),
        (tmp_path, "no tokenizer that transformers can load"),
    ]:
        with pytest.raises(ConfigError, match=f"model.path = .*: {message}"):
            load_tokenizer(make_config(model=ModelConfig(path=str(folder))))


async def test_a_teacher_scores_finished_groups_and_no_held_out_answers(episodes) -> None:
    async def teacher(group: RolloutGroup) -> RolloutGroup:
        asked.append(group)
        return replace(group, missing="seen")

    asked: list[RolloutGroup] = []
    built = episodes(engine=text_engine("46", "5"), teacher=teacher)
    assert (await built.run(claim())).missing == "seen"
    assert [rollout.reward.value for rollout in asked[0].rollouts] == [1.0, 0.0]
    assert (await built.run(claim(evaluation_id="0-1"))).missing == "" and len(asked) == 1


async def test_a_group_whose_teacher_fails_or_hangs_is_dead_with_all_that_was_sampled(episodes) -> None:
    async def fails(group: RolloutGroup) -> RolloutGroup:
        raise TeacherError("HTTP 400: too long")

    async def hangs(group: RolloutGroup) -> RolloutGroup:
        await asyncio.Event().wait()
        return group

    producers = ProducersConfig(generation_deadline_s=0.5)
    for teacher, reason in ((fails, "teacher: HTTP 400: too long"), (hangs, "deadline: not finished after 0.5 s")):
        engine = text_engine("46", "5")
        dead = await episodes(engine=engine, teacher=teacher, producers=producers).run(claim())
        assert isinstance(dead, Dead) and dead.reason.startswith(reason)
        assert [rollout.reward.value for rollout in dead.group.rollouts] == [1.0, 0.0]


async def test_a_group_that_cannot_be_within_the_lag_bound_is_given_up_while_it_is_sampled(episodes) -> None:
    engine = ScriptedEngine(num_tokens=4, script=lambda prompt, sibling: ids("46" if sibling else "4646"))
    engine.stepped = lambda request_id, num_sampled: engine.may_sample.clear()  # type: ignore[method-assign]
    one, task = episodes(engine=engine, max_lag=2), claim()
    running = asyncio.create_task(one.run(task))
    await until(lambda: task.in_flight is not None and task.in_flight.so_far() is not None)
    engine.policy_version = 2
    engine.may_sample.set()
    await until(lambda: task.in_flight.so_far().rollouts[0].num_sampled_tokens == 2)
    for version in (1, 2, make_version(1, 0)):  # lag through a fork is the trainer's to know
        one.abort_past_lag(task, version)
    assert not running.done() and task.past_lag is None
    for _ in range(2):
        one.abort_past_lag(task, 3)
    dead = await running
    assert dead.reason == "lag: not finished after 3 optimizer steps, more than max_lag = 2 (producers.abort_past_lag)"
    assert died_of_length(dead.reason) and len(engine.cancelled) == 1
    spans = [
        [(span.version, span.end - 6) for span in rollout.segments[0].version_spans] for rollout in dead.group.rollouts
    ]
    assert spans == [[(0, 1), (2, 2)]] * 2
    assert one._metrics.tokens_aborted._value.get() == 4
    # One that is only scored yet is past its last policy.
    engine.may_sample.set()
    engine.stepped = lambda request_id, num_sampled: None  # type: ignore[method-assign]
    scored = asyncio.Event()

    async def slow(prompt: Prompt, completion: str) -> float:
        scored.set()
        await release.wait()
        return 1.0

    release = asyncio.Event()
    two, task = episodes(engine=engine, reward=slow, max_lag=2), claim(attempt=2)
    running = asyncio.create_task(two.run(task))
    await scored.wait()
    two.abort_past_lag(task, 100)
    release.set()
    assert isinstance(await running, RolloutGroup)
