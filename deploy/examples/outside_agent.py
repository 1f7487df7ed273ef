"""An agent outside Penstock: the `openai` package, a calculator, and a reward. `deploy/docs/agents.md` tells the rest.

python deploy/examples/outside_agent.py http://127.0.0.1:9500
"""

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openai import APIConnectionError, APIStatusError, OpenAI, RateLimitError

NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
ADD = {"name": "add", "description": "Adds a and b.", "parameters": NUMBERS}
TOOLS: list[Any] = [{"type": "function", "function": ADD}]
KEY = os.environ.get("PENSTOCK_API_KEY", "none")


def add(arguments: str) -> str:
    """What the tool says to a call, whatever a policy has made of its arguments."""
    try:
        numbers = json.loads(arguments)
        return str(numbers["a"] + numbers["b"])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error!r}"


def solve(task: dict, client: OpenAI) -> float:
    """The agent itself: at most four turns, and the reward of what it says in the end."""
    messages = list(task["messages"] or ()) or [{"role": "user", "content": task["text"]}]
    for _ in range(4):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        message: Any = reply.choices[0].message
        if not message.tool_calls:
            return float(task["answer"] in (message.content or ""))
        messages.append(message)
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": add(call.function.arguments)})
    return 0.0


def work(url: str) -> None:
    """One rollout after another, until the producer is gone."""
    server = OpenAI(base_url=url, api_key=KEY)
    while True:
        try:
            rollout: Any = server.post("/r", cast_to=object)
            reward = solve(rollout["prompt"], OpenAI(base_url=rollout["base_url"], api_key=KEY))
            server.post(f"/r/{rollout['id']}/finish", body={"reward": reward}, cast_to=object)
            print(f"task {rollout['index']}: {reward}")
        except RateLimitError as later:  # no credit: the trainer has enough to do
            time.sleep(float(later.response.headers["retry-after"]))
        except APIStatusError as lost:  # given up, or too long for the context
            print(f"a rollout is lost: {lost}")
        except APIConnectionError:
            return


if __name__ == "__main__":
    with ThreadPoolExecutor(16) as agents:
        list(agents.map(work, sys.argv[1:] * 16))
