"""An agent outside Penstock: the `openai` package, a calculator, and a reward. `deploy/docs/agents.md` tells the rest.

python deploy/examples/outside_agent.py http://127.0.0.1:9500
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

ARGUMENTS = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "calculator", "parameters": ARGUMENTS}}]


def calculator(arguments: str) -> str:
    """What the tool says to a call, whatever a policy has made of its arguments: `2*3-4` is 2."""
    try:
        terms = re.split(r"(?<=[0-9])(?=[-+])", json.loads(arguments)["expression"])
        return str(sum(math.prod(map(int, term.split("*"))) for term in terms))
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error!a}"


def solve(task: dict, client: OpenAI) -> float:
    """The agent itself: at most four turns, and the reward of what it says in the end."""
    messages = list(task["messages"])
    for _ in range(4):
        try:
            reply = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        except BadRequestError:  # it has talked beyond the model's context, and is worth nothing for it
            return 0.0
        message: Any = reply.choices[0].message
        if not message.tool_calls:
            return float(message.content == task["answer"])
        messages.append(message)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculator(call.function.arguments)})
    return 0.0


def work(url: str) -> None:
    """One rollout after another, until the producer is gone."""
    server = OpenAI(base_url=url, api_key=os.environ.get("PENSTOCK_API_KEY", "none"))
    with suppress(APIConnectionError):
        while True:
            with suppress(APIStatusError):  # no credit yet, though the client waited for it, or the rollout is lost
                rollout: Any = server.post("/r", cast_to=object)
                reward = solve(rollout["prompt"], server.with_options(base_url=rollout["base_url"]))
                server.post(f"/r/{rollout['id']}/finish", body={"reward": reward}, cast_to=object)
                print(f"task {rollout['index']}: {reward}\n", end="", flush=True)


if __name__ == "__main__":
    with ThreadPoolExecutor(16) as agents:
        list(agents.map(work, sys.argv[1:] * 16))
