"""The endpoint in a producer process of its own: found by its heartbeat, ended by a signal, never in its way."""

import asyncio
import json
import signal
import urllib.request
from pathlib import Path

import pytest

from agent_client import AgentClient
from chat_templates import tokenizer_of
from penstock.schemas.config import EndpointConfig, ModelConfig
from penstock.schemas.heartbeat import decode_heartbeat
from penstock.schemas.keys import PRODUCERS_GROUP, Field
from producer_run import KEYS, QUICK
from waiting import until

pytestmark = [pytest.mark.redis, pytest.mark.slow]

ASKED = [{"role": "user", "content": "what is three plus four"}]


def counted(server, metric: str) -> float:
    data = server.client.get(KEYS.producer("a"))
    with urllib.request.urlopen(f"http://127.0.0.1:{decode_heartbeat(data).metrics_port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    (line,) = (line for line in lines if line.startswith(metric + "{"))
    return float(line.split()[-1])


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
    process = start_producer(config, server.url, "a", token_s=600.0, max_model_len=4096)

    def url() -> str:
        data = server.client.get(KEYS.producer("a"))
        return decode_heartbeat(data).endpoint if data is not None else ""

    await until(lambda: process.poll() is not None or url() != "", 60)
    client = AgentClient(url())
    rollout = await client.open()
    path = f"/r/{rollout['id']}/v1/chat/completions"
    calling = asyncio.create_task(client.request("POST", path, {"messages": ASKED}))
    await until(lambda: counted(server, "penstock_agent_calls_running") == 1, 60)
    await until(lambda: counted(server, "penstock_progress_bytes_total") > 0, 60)  # it knows that others can go on
    process.send_signal(signal.SIGTERM)
    # Far less than the call would take.
    await until(lambda: process.poll() is not None, 60)
    assert process.returncode == 0
    answered = await asyncio.gather(calling, return_exceptions=True)
    assert isinstance(answered[0], Exception) or answered[0][1]["error"]["code"] == "rollout_moving"
    await client.close()
    ((_, fields),) = server.client.xrange(KEYS.prompts)
    (claim,) = server.client.xpending_range(KEYS.prompts, PRODUCERS_GROUP, "-", "+", 2, idle=10**6)
    assert fields[Field.INDEX] == b"1" and claim["times_delivered"] == 0
