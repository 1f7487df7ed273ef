"""The endpoint in a producer process of its own: found by its heartbeat, ended by a signal, never in its way."""

import asyncio
import json
import signal
import time
from pathlib import Path

import pytest
from agent_client import AgentClient
from chat_templates import tokenizer_of
from producer_run import KEYS, QUICK, until

from schemas.config import EndpointConfig, ModelConfig
from schemas.heartbeat import decode_heartbeat
from schemas.keys import Field

pytestmark = [pytest.mark.redis, pytest.mark.slow]

ASKED = [{"role": "user", "content": "what is three plus four"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer that has a chat template."""
    folder = tmp_path / "model"
    tokenizer_of("chatml").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 4096}))
    return folder


async def test_a_signal_ends_a_producer_in_the_middle_of_an_agent_s_call(
    redis_server, make_config, hand_trainer, start_producer, model, tmp_path
) -> None:
    server = redis_server()
    endpoint = EndpointConfig(port=0)
    config = make_config(producers=QUICK, endpoint=endpoint, model=ModelConfig(path=str(model)))
    trainer = hand_trainer(server.client, config, tmp_path)
    trainer.announce(0)
    trainer.release(1, 1)
    process = start_producer(config, server.url, "a", token_s=30.0, max_model_len=4096)

    def url() -> str:
        data = server.client.get(KEYS.producer("a"))
        return decode_heartbeat(data).endpoint if data is not None else ""

    await until(lambda: process.poll() is not None or url() != "", 60)
    client = AgentClient(url())
    rollout = await client.open()
    path = f"/r/{rollout['id']}/v1/chat/completions"
    calling = asyncio.create_task(client.request("POST", path, {"messages": ASKED}))
    await asyncio.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    await until(lambda: process.poll() is not None, 30)
    assert process.returncode == 0 and time.monotonic() - started < 15
    answered = await asyncio.gather(calling, return_exceptions=True)
    assert isinstance(answered[0], Exception) or answered[0][0] == 410
    await client.close()
    ((_, fields),) = server.client.xrange(KEYS.prompts)
    assert fields[Field.INDEX] == b"1" and fields[Field.ATTEMPT] == b"0"
