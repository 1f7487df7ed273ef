"""A server of the library OpenEnv, over its own client."""

import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from penstock.producers.environments.openenv import OpenEnvEnvironment
from penstock.producers.interfaces import Environment
from penstock.schemas.config import EnvironmentConfig
from penstock.schemas.process.plugins import construct
from scripted_conversation import ScriptedConversation

pytest.importorskip("openenv", reason="openenv-core is not installed: pip install -e '.[dev]'")
pytestmark = pytest.mark.filterwarnings("ignore")


@contextmanager
def _served() -> Iterator[str]:
    from openenv_server import app

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive()
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with _served() as address:
        yield address


async def test_resets_steps_and_rewards_are_the_server_s(url: str) -> None:
    settings = {"url": url, "observation": "text", "reset": {"most": 5}, "instructions": "Be quick."}
    environment = OpenEnvEnvironment(seed=1, **settings)
    prompt = environment.prompt(1)
    secret = random.Random(int(prompt.metadata["seed"])).randint(1, 5)
    conversation = ScriptedConversation("0", "9", str(secret))
    reward = await environment.converse(prompt, conversation)
    assert (reward.value, reward.parts) == (0.75, {"finished": 1.0})
    begun = [{"role": "system", "content": "Be quick."}, {"role": "user", "content": "Guess a number from 1 to 5."}]
    assert conversation.asked[0] == begun and conversation.read[1:] == ["higher", "lower"]
    assert (await environment.reward(prompt, "0")).parts == {"finished": 0.0}
    whole = ScriptedConversation(str(secret))
    await OpenEnvEnvironment(seed=1, url=url, reset={"most": 5}).converse(prompt, whole)
    assert whole.read == ['{"text": "Guess a number from 1 to 5.", "picture": []}']


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fields": {"mode": "unrewarded"}}, "no step of the episode had a reward"),
        ({"fields": {"mode": "broken"}}, "the dice are lost"),
        (
            {"fields": {"mode": 3}},
            "does not take an action with the fields ['message', 'mode']: RuntimeError: Server error",
        ),
        ({"observation": "reward"}, "no field 'reward' in the observation, found ['picture', 'text']"),
        ({"observation": "picture"}, "the observation's field 'picture' is of type list, expected text"),
    ],
)
async def test_a_rollout_dies_of_what_the_server_refuses_or_lacks(url: str, settings: dict, message: str) -> None:
    environment = OpenEnvEnvironment(seed=1, url=url, **settings)
    for _ in range(2):  # the server's only session is free again
        with pytest.raises(Exception, match=re.escape(message)):
            await environment.reward(environment.prompt(1), "3")


async def test_a_session_too_many_names_the_setting_that_limits_them(url: str) -> None:
    environment = OpenEnvEnvironment(seed=1, url=url)
    episode = await environment.begin(1)
    with pytest.raises(RuntimeError, match=r"does not take a session \(environment.max_conversations"):
        await environment.begin(2)
    await episode.close()


async def test_a_rollout_dies_with_its_server() -> None:
    with _served() as address:
        environment = OpenEnvEnvironment(seed=1, url=address)
        await environment.reward(environment.prompt(1), "3")
    with pytest.raises(RuntimeError, match=f"Failed to connect to {address.replace('http', 'ws')}"):
        await environment.reward(environment.prompt(1), "3")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"action": "guess"}, "action: the server has no field 'guess' in it, expected one of metadata, message, mode"),
        ({"fields": {"level": 3}}, "action: the server has no field 'level' in it"),
        ({"observation": "board"}, "observation: the server has no field 'board' in it, expected one of done, reward"),
    ],
)
def test_fields_that_the_server_lacks_are_refused(url: str, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        OpenEnvEnvironment(seed=1, url=url, **settings)


@pytest.mark.parametrize(
    ("url", "message"),
    [("http://127.0.0.1:9", "no OpenEnv server answers at http://127.0.0.1:9/schema"), ("my-lab", "no OpenEnv")],
)
def test_a_server_that_does_not_answer_is_an_error_of_the_run_file(url: str, message: str) -> None:
    kwargs: dict[str, Any] = {"url": url}
    plug = EnvironmentConfig(path="penstock.producers.environments.openenv:OpenEnvEnvironment", kwargs=kwargs)
    with pytest.raises(ValueError, match=re.escape(message)):
        construct(plug, "environment", Environment, seed=0)
