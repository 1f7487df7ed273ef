"""An agent outside Penstock: the `openai` package, a tool and a reward of its own. More: docs/agents.md.

python docs/examples/outside_agent.py http://127.0.0.1:9500
"""

import json
import math
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from openai import APIConnectionError, APIStatusError, BadRequestError, OpenAI

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}]


def calculator(arguments: str) -> str:
    """`{"expression": "2*3-4"}` is 2, and what is none is told to the model."""
    try:
        terms = re.split(r"(?<=[0-9])(?=[-+])", json.loads(arguments)["expression"])
        return str(sum(math.prod(map(int, term.split("*"))) for term in terms))
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error!a}"


def solve(messages: list[Any], answer: str, client: OpenAI) -> float:
    """The agent itself: at most four turns, and the reward of what it says in the end."""
    with suppress(BadRequestError):  # it has talked beyond the model's context, and is worth nothing for it
        for _ in range(4):
            reply = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            message: Any = reply.choices[0].message
            if not message.tool_calls:
                return float(message.content == answer)
            messages.append(message)
            for call in message.tool_calls:
                result = calculator(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def work(url: str) -> None:
    """One rollout after another, until the producer is gone."""
    server = OpenAI(base_url=url, api_key=os.environ.get("PENSTOCK_API_KEY", "none"))
    with suppress(APIConnectionError):
        while True:
            with suppress(APIStatusError):  # no credit yet, though the client waited for it, or the rollout is lost
                rollout: Any = server.post("/r", cast_to=object)
                task, client = rollout["prompt"], server.with_options(base_url=rollout["base_url"])
                reward = solve(task["messages"], task["answer"], client)
                server.post(f"/r/{rollout['id']}/finish", body={"reward": reward}, cast_to=object)
                print(f"task {rollout['index']}: {reward}\n", end="", flush=True)


if __name__ == "__main__":
    with ThreadPoolExecutor(16) as agents:
        list(agents.map(work, sys.argv[1:] * 16))
