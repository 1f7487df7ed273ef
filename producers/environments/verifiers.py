"""Any environment of the library verifiers, unchanged: its tasks, turns, tools, stop conditions and rewards."""

import signal
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from penstock.producers.environments.dataset import task_of
from penstock.producers.environments.stepping import OneAnswer
from penstock.producers.interfaces import Conversation
from penstock.schemas.process.stopping import stop_signals
from penstock.schemas.prompt import Message, Prompt, Reward


class Library(Protocol):
    """An environment as one of the library's interfaces has it."""

    @property
    def training(self) -> Sequence[Any]:
        """Its tasks."""
        ...

    @property
    def evaluation(self) -> Sequence[Any]:
        """Those that are held out."""
        ...

    def pose(self, task: Any) -> tuple[tuple[Message, ...], str]:
        """Returns the messages that a task begins with, and its answer."""
        ...

    async def run(self, task: Any, conversation: Conversation) -> Reward:
        """Holds one conversation. Raises RuntimeError if the library records an error of it."""
        ...


class VerifiersEnvironment:
    """An environment that `verifiers.load_environment` loads, with release 0.4 the one of a taskset.

    Tasks are shuffled per epoch. Held out are those of the evaluation set, with 0.4 the first `num_evaluation_prompts`
    of all. A rollout in which verifiers records an error dies of it. Other rollouts get its reward, with its metrics as
    parts.

    id: of an installed environment or taskset, or of a module in the working directory.
    args: of its `load_environment`, with 0.4 the taskset's settings.
    env: with 0.4, further settings of the environment, such as `agent.harness` and `agent.runtime`.
    num_evaluation_prompts: how many held-out tasks to use, from the first on; None means the whole evaluation set.

    Raises:
        ValueError: it cannot be loaded, has no tasks, or scores the rollouts of a group together (their rewards or
            their advantages).
        ImportError: verifiers is not installed, or in another release.
    """

    def __init__(
        self,
        *,
        seed: int,
        id: str,
        args: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
        num_evaluation_prompts: int | None = None,
    ) -> None:
        handlers = {number: signal.getsignal(number) for number in stop_signals()}
        try:
            self._library = _library(id, args or {}, env or {}, num_evaluation_prompts)
        except ImportError:
            raise
        except Exception as error:  # the environment is the user's
            raise ValueError(f"VerifiersEnvironment: id = {id!r}: {type(error).__name__}: {error}") from error
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)  # it installs its own, which exit at once
        if not self._library.training:
            raise ValueError(f"VerifiersEnvironment: {id!r} has no training rows")
        self._seed = seed
        self.num_tasks = len(self._library.training)
        available = len(self._library.evaluation)
        wanted = available if num_evaluation_prompts is None else num_evaluation_prompts
        if not 0 <= wanted <= available:
            raise ValueError(f"VerifiersEnvironment: num_evaluation_prompts is {wanted}, expected 0 to {available}")
        self.num_evaluation_prompts = wanted

    def prompt(self, index: int) -> Prompt:
        return self._pose("training", task_of(index, self.num_tasks, self._seed))

    def evaluation_prompt(self, n: int) -> Prompt:
        return self._pose("evaluation", n - 1)

    async def reward(self, prompt: Prompt, completion: str) -> Reward:
        """Returns the reward of a conversation with this answer alone; there is no room for another turn."""
        return await self.converse(prompt, OneAnswer(completion))

    async def converse(self, prompt: Prompt, conversation: Conversation) -> Reward:
        tasks = getattr(self._library, prompt.metadata["set"])
        return await self._library.run(tasks[int(prompt.metadata["row"])], conversation)

    def _pose(self, name: str, number: int) -> Prompt:
        messages, answer = self._library.pose(getattr(self._library, name)[number])
        return Prompt(messages=messages, answer=answer, metadata={"set": name, "row": str(number)})


def _library(id: str, args: Mapping[str, Any], env: Mapping[str, Any], num_evaluation_prompts: int | None) -> Library:
    """Returns the environment by the interface that the installed release has."""
    try:
        release = version("verifiers")
    except PackageNotFoundError as error:
        raise ImportError("verifiers is not installed: pip install 'penstock[verifiers]'") from error
    series = release.split(".")[:2]
    if series in (["0", "2"], ["0", "3"]):
        from penstock.producers.environments.verifiers_rows import RowsLibrary

        if env:
            raise ValueError(f"env = {env}: release {release} has none; expected it with 0.4 alone")
        return RowsLibrary(id, args)
    if series == ["0", "4"]:
        from penstock.producers.environments.verifiers_tasksets import TasksetLibrary

        return TasksetLibrary(id, args, env, num_evaluation_prompts or 0)
    raise ImportError(f"verifiers {release} is installed, expected 0.2, 0.3 or 0.4: pip install 'penstock[verifiers]'")
