"""The seams of a producer: `Environment`, which poses tasks and scores answers, and `Engine`, which samples. Neither
needs a base class; a run file names an environment by its import path (`environment.path = "my_lab:Capitals"`).

    from penstock.schemas.prompt import Prompt

    class Capitals:
        num_evaluation_prompts = 1

        def __init__(self, *, seed: int) -> None:
            self.tasks = [("France", "Paris"), ("Japan", "Tokyo")]

        def prompt(self, index: int) -> Prompt:
            country, capital = self.tasks[index % 2]
            return Prompt(text=f"The capital of {country} is", answer=capital)

        def evaluation_prompt(self, n: int) -> Prompt:
            return Prompt(text="The capital of Peru is", answer="Lima")

        def reward(self, prompt: Prompt, completion: str) -> float:
            return float(completion.strip().startswith(prompt.answer))

`ConversingEnvironment` is for tasks of several turns.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from penstock.schemas.images import ImagePlace
from penstock.schemas.policy import WeightManifest
from penstock.schemas.process.plugins import offers
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.rollout import EngineFingerprint, FinishReason, SamplingSettings, TopLogprobs, VersionSpan
from penstock.schemas.routes import Routes

Restore = Callable[[], Awaitable[str]]
T = TypeVar("T")

MOST_STATE_BYTES = 1 << 20
"""The most that one state of a conversation may take beside its recorded calls."""


class PlacedImages(NamedTuple):
    """The images of a prompt: where its tokens stand for them, in order, and their files by digest."""

    places: tuple[ImagePlace, ...] = ()
    files: Mapping[str, bytes] = {}


NO_IMAGES = PlacedImages()


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled continuation of a prompt.

    token_ids: int32 bytes, `[num_sampled]`, the stop token included if it was sampled.
    behavior_logprobs: float32 bytes, `[num_sampled]`, processed, natural log.
    version_spans: tile `[0, num_sampled)`.
    sampling_mask: see `penstock.schemas.rollout.Segment`.
    routes: of the prompt and the sampled tokens, without the last one; in a later part, of the token before each of its
        own. None unless `model.replay_routes`.
    top_logprobs: of the sampled tokens. None unless the request's sampling asks for them.
    """

    token_ids: bytes
    behavior_logprobs: bytes
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    sampling_mask: tuple[bytes, ...] | None = None
    routes: Routes | None = None
    top_logprobs: TopLogprobs | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    @property
    def num_context_routes(self) -> int:
        """Tokens in `routes` before the one whose hidden states chose the first sampled token."""
        return 0 if self.routes is None else self.routes.num_rows - self.num_tokens

    def part(self, start: int, end: int) -> "Completion":
        """Returns the tokens from `start` to before `end`."""
        inside = (span for span in self.version_spans if span.start < end and span.end > start)
        context = self.num_context_routes
        return msgspec.structs.replace(
            self,
            token_ids=self.token_ids[4 * start : 4 * end],
            behavior_logprobs=self.behavior_logprobs[4 * start : 4 * end],
            version_spans=tuple(
                VersionSpan(span.version, max(span.start, start) - start, min(span.end, end) - start) for span in inside
            ),
            sampling_mask=None if self.sampling_mask is None else self.sampling_mask[start:end],
            routes=None if self.routes is None else self.routes.part(context + start if start else 0, context + end),
            top_logprobs=self.top_logprobs and self.top_logprobs.part(start, end),
        )


class RolloutFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a rollout apart from its text, for a reward with a parameter `facts`."""

    num_prompt_tokens: int
    """Of the first turn."""
    num_tokens: int
    """Sampled tokens of all turns, the stop token included if it was sampled."""
    max_tokens: int
    """The most tokens that it could have: sampling.max_tokens, or what the prompt leaves of the model's context. In a
    conversation sampling.max_tokens, which limits one turn."""
    finish_reason: FinishReason
    """Of the last turn."""
    num_turns: int = 1
    """Calls of the model."""

    @property
    def is_truncated(self) -> bool:
        """True if the token limit cut it off."""
        return self.finish_reason == "length"


class EngineError(RuntimeError):
    """The engine cannot serve as configured; the message names the setting, the value wanted and the value found."""


class WeightLoadError(RuntimeError):
    """New weights could not be loaded; the engine still serves `policy_version`, labelled so."""


class CaptureError(RuntimeError):
    """Hidden states could not be recorded; the engine serves as before."""


class Engine(Protocol):
    """Samples from a policy whose weights can be replaced while it samples."""

    policy_version: int
    """The version that tokens sampled now are labelled with."""
    fingerprint: EngineFingerprint
    max_model_len: int
    """Longest prompt plus completion, in tokens."""

    @property
    def takes_images(self) -> bool:
        """False for a model of text."""
        ...

    @property
    def image_processor(self) -> Mapping[str, Any]:
        """The settings of its image processor (`penstock.schemas.images.processor_settings`); empty for one of text,
        and of one whose processor is not transformers'."""
        ...

    async def expand(self, prompt_token_ids: list[int], files: Sequence[bytes]) -> tuple[list[int], PlacedImages]:
        """Puts the tokens of images in the places of their placeholders, in order; a model of text has none.

        Raises:
            ValueError: an image that the model cannot be given, or another number of placeholders.
        """
        ...

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling: SamplingSettings,
        num_siblings: int,
        request_id: str,
        stop: Sequence[str] = (),
        seed: int | None = None,
        images: PlacedImages = NO_IMAGES,
    ) -> list[Completion]:
        """Samples `num_siblings` completions of one prompt; cancelling the call aborts the request.

        images: of the prompt, as `expand` has placed them.
        stop: a completion may, but need not, end after the token that completes one of these texts.
        seed: decides together with the sibling's number what is drawn, whatever else is sampled; None draws from the
            engine's own generator.

        A completion that the engine itself aborts has the finish reason "abort" and the tokens sampled until then.
        """
        ...

    def sampled(self, request_id: str) -> list[Completion]:
        """Returns what is sampled of a running request's siblings, an unfinished one with the finish reason "abort";
        empty for a request that is not running.

        Raises:
            EngineError: what is sampled is inconsistent.
        """
        ...

    async def load_weights(self, manifest: WeightManifest, path: str, restore: Restore | None = None) -> float:
        """Replaces the weights in flight with those of the verified safetensors file at `path`, which nobody changes
        until the call returns.

        restore: called after a load that failed half-way; restores the file of the weights loaded before and returns
            its path. None if the file loaded last, or the base model, is unchanged.

        Returns the seconds during which no token was sampled.

        Raises:
            WeightLoadError: the old version still serves, labelled so.
        """
        ...

    async def check(self) -> None:
        """Waits for a sign of life, for a limited time.

        Raises:
            EngineError: the engine gives none, or has stopped; requests in flight will not end.
        """
        ...

    async def close(self) -> None: ...


class InspectableEngine(Engine, Protocol):
    """An engine that can show the hidden states of its model."""

    async def capture(self, token_ids: list[int], path: str) -> None:
        """Replays one sequence with the weights served now and writes its hidden states to `path`, in the layout of
        `penstock.schemas.hidden_states`.

        Raises:
            ValueError: the engine refuses the sequence.
            CaptureError: it is not idle, or it cannot record a model of this architecture.
        """
        ...


class Environment(Protocol):
    """Poses tasks and scores answers. Constructed with the run file's keyword arguments and `seed`.

    An environment with a data set may have an attribute `num_tasks`: `prompt` poses another row for every index up to
    it. Curricula choose among these.
    """

    num_evaluation_prompts: int

    def prompt(self, index: int) -> Prompt:
        """Returns training task `index`, from 1 over all dataset epochs; the same index always names the same task."""
        ...

    def evaluation_prompt(self, n: int) -> Prompt:
        """Returns held-out task `n`, from 1 to `num_evaluation_prompts`."""
        ...

    @offers("facts", coroutine=True)
    def reward(self, prompt: Prompt, completion: str) -> float | Reward:
        """Returns what one answer is worth. May be a coroutine, may take `facts: RolloutFacts`, and with `completions`
        instead of `completion` it scores all siblings at once and returns a list."""
        ...


class State(Protocol):
    """What the actions of a conversation change, such as a sandbox's files."""

    async def save(self, most_bytes: int) -> bytes | None:
        """Returns it as bytes, the same ones for the same state; None if they are more than `most_bytes`."""
        ...

    async def restore(self, state: bytes) -> None:
        """Makes a new one what `save` has returned."""
        ...


class Conversation(Protocol):
    """One rollout as a conversing environment sees it: any number of calls, one after another or concurrent."""

    async def chat(self, messages: list[dict[str, Any]], *, is_trained: bool = True, **fields: Any) -> dict[str, Any]:
        """Returns the assistant's message, to append to `messages` as it is.

        is_trained: False for an answer whose tokens are not trained, such as those of an opponent in self-play. It
            comes from the same policy, and `facts` leave it out.
        fields: of OpenAI's request (`tools`).

        Raises:
            ApiError: the request cannot be answered; its `code` is `context_length_exceeded` for one that exceeds the
                context and `rollout_ended` after the end of the rollout.
            EngineError: the engine serves no longer.
        """
        ...

    async def act(self, action: Callable[[], Awaitable[T]], state: State | None = None) -> T:
        """Does something that has an effect, such as a tool call, and returns what it returns. One after another.

        What an action has returned is kept with the recorded calls. When another producer repeats the conversation,
        it is returned again and `action` is not called; with the last one that was kept, `state` is restored to what it
        was then, so that the conversation goes on as if nothing had happened.

        action: returns values that MessagePack holds.
        state: what the actions change, the same one for all of a conversation. Beyond `MOST_STATE_BYTES` the group's
            progress is not kept, and another producer starts it again.

        Raises:
            TypeError: the returned value cannot be kept.
            ApiError: another producer continues the rollout.
        """
        ...

    @property
    def facts(self) -> RolloutFacts:
        """The facts of the calls answered until now.

        Raises:
            LookupError: no call is answered yet.
        """
        ...


class ConversingEnvironment(Environment, Protocol):
    """An environment that holds its conversations itself. The run file needs an `[endpoint]` table."""

    async def converse(self, prompt: Prompt, conversation: Conversation) -> float | Reward:
        """Holds one rollout of a training or a held-out prompt, from its first call to its reward."""
        ...
