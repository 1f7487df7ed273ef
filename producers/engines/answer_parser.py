"""Applies vLLM's own parsers of reasoning and tool calls to sampled answers."""

import logging
from collections.abc import Mapping
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import Parser, ParserManager

from penstock.producers.endpoint.chat.answers import ParsedAnswer
from penstock.producers.endpoint.chat.requests import ChatRequest
from penstock.schemas.config import ConfigError, EndpointConfig

# A policy that learns to call tools first writes malformed calls, and each would be logged with its traceback.
logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)


class VllmAnswerParser:
    """Splits an answer into reasoning, content and calls as vLLM's own server would."""

    skip_special_tokens = False

    def __init__(self, tokenizer: Any, config: EndpointConfig, variables: Mapping[str, Any]) -> None:
        """variables: `model.chat_template_kwargs`, which a request's own override.

        Raises:
            ConfigError: vLLM has no parser of this name, or it does not fit the model's tokenizer.
        """
        self._tokenizer, self._variables = tokenizer, variables
        names = {"tool_parser": config.tool_parser, "reasoning_parser": config.reasoning_parser}
        try:
            parser = ParserManager.get_parser(
                tool_parser_name=config.tool_parser,
                reasoning_parser_name=config.reasoning_parser,
                enable_auto_tools=True,
                tokenizer=tokenizer,
            )
        except Exception as error:  # vLLM and each parser raise their own types
            asked = ", ".join(f"endpoint.{name} = {value!r}" for name, value in names.items() if value is not None)
            raise ConfigError(f"{asked}: {error}; expected names of vLLM's parsers for this model") from error
        if parser is None:
            raise ConfigError("endpoint: neither tool_parser nor reasoning_parser is set, expected one of them")
        self._parser: type[Parser] = parser

    def parse(self, text: str, token_ids: list[int], request: ChatRequest, prompt_ids: list[int]) -> ParsedAnswer:
        # Parsers read only a request's tools; validating the whole conversation again would be a waste.
        fields: dict[str, Any] = {"messages": [{"role": "user", "content": ""}], "tool_choice": "none"}
        if request.use_tools:
            fields |= {"tools": request.tools, "tool_choice": "auto"}
        asked = ChatCompletionRequest.model_validate(fields)
        tools: Any = asked.tools
        variables = {**self._variables, **request.template_arguments}
        parser = self._parser(self._tokenizer, tools, chat_template_kwargs=variables)
        parser.set_prompt_token_ids(prompt_ids)
        reasoning, content, calls = parser.parse(
            text, asked, enable_auto_tools=request.use_tools, model_output_token_ids=token_ids
        )
        return ParsedAnswer(content, reasoning, tuple((call.name, call.arguments) for call in calls or ()))
