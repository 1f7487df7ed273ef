"""Parses answers without vLLM: calls between <tool_call> tags, reasoning between <think> tags."""

import json
import re

from penstock.producers.endpoint.chat.answers import ParsedAnswer
from penstock.producers.endpoint.chat.requests import ChatRequest


class TagParser:
    skip_special_tokens = False

    def parse(self, text: str, token_ids: list[int], request: ChatRequest, prompt_ids: list[int]) -> ParsedAnswer:
        reasoning = None
        if found := re.match(r"<think>\n?(.*?)\n?</think>\n*", text, re.DOTALL):
            reasoning, text = found[1], text[found.end() :]
        calls = []
        for inside in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL) if request.use_tools else ():
            call = json.loads(inside)
            calls.append((call["name"], json.dumps(call["arguments"])))
        content = re.sub(r"\s*<tool_call>.*?</tool_call>\s*", "", text, flags=re.DOTALL) if calls else text
        return ParsedAnswer(content or None, reasoning, tuple(calls))
