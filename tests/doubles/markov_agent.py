"""A Qwen3 with constructed weights whose next token depends on the last one alone: a policy that calls a tool or
answers, whose logprobs are known exactly, and whose letters tell which version sampled them.

It spells its answers letter by letter and writes tool calls as no template does: every second turn of a conversation
drifts if prompts are rendered from messages.
"""

import copy
import math
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from chat_templates import tokenizer_of

HIDDEN = 640
LETTERS = ("sevn", "tugo")
"""The letters of the answers of even and odd versions."""
CALL = '{"arguments":{"a":3,"b":4},"name":"add"}'
"""The content of a tool call, one token."""
STAY = 0.97
"""Probability that an answer continues after its last letter."""
FLOOR = 1e-12
"""Approximate probability of each token that a row does not name."""


def agent_tokenizer() -> Any:
    tokenizer = copy.deepcopy(tokenizer_of("qwen3"))
    tokenizer.add_tokens([CALL])
    return tokenizer


class MarkovAgent:
    """The model in a folder, and its policies by version."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = agent_tokenizer()
        self.folder = folder
        self._size = len(self.tokenizer)
        self._model = self._build()
        self._model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def letters(self, version: int) -> list[int]:
        """Returns the ids of the letters of a version's answers."""
        return [self._id(letter) for letter in LETTERS[version % 2]]

    def logprobs(self, version: int) -> torch.Tensor:
        """Returns the logprobs as float64 `[last token, next token]`."""
        table = torch.full((self._size, self._size), math.log(FLOOR), dtype=torch.float64)
        for last, following in self._rows(version).items():
            for token, chance in following.items():
                table[last, token] = math.log(chance)
        return torch.log_softmax(table, dim=-1)

    def weights(self, version: int) -> dict[str, torch.Tensor]:
        """Returns the weights of a version."""
        head = torch.zeros(self._size, HIDDEN)
        # The final norm makes a one-hot vector sqrt(HIDDEN) long.
        head[:, : self._size] = (self.logprobs(version).T / math.sqrt(HIDDEN)).float()
        named = {name: parameter.detach().contiguous() for name, parameter in self._model.named_parameters()}
        return named | {"lm_head.weight": head.contiguous()}

    def _rows(self, version: int) -> dict[int, dict[int, float]]:
        first, second, third, last = self.letters(version)
        end = self._id("<|im_end|>")
        rows = {
            self._id("\n"): {self._id("<tool_call>"): 0.5, first: 0.5},
            self._id("<tool_call>"): {self._id(CALL): 1.0},
            self._id(CALL): {self._id("</tool_call>"): 1.0},
            self._id("</tool_call>"): {end: 1.0},
            first: {second: 1.0},
            second: {third: 1.0},
            third: {last: 1.0},
            last: {second: STAY, end: 1.0 - STAY},
        }
        # An answer that the other version began continues in the letters of this one.
        return rows | {letter: {second: 1.0} for letter in self.letters(version + 1)}

    def _id(self, text: str) -> int:
        (token_id,) = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return token_id

    def _build(self) -> Qwen3ForCausalLM:
        assert self._size <= HIDDEN
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=self._size,
                hidden_size=HIDDEN,
                intermediate_size=64,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=32,
                max_position_embeddings=4096,
                tie_word_embeddings=False,
                rms_norm_eps=1e-12,
                eos_token_id=self._id("<|im_end|>"),
            )
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.zero_()
            model.model.embed_tokens.weight.zero_()
            model.model.embed_tokens.weight[:, : self._size] = torch.eye(self._size)
            model.lm_head.weight.zero_()
            model.lm_head.weight[:, : self._size] = (self.logprobs(0).T / math.sqrt(HIDDEN)).float()
        return model.float().eval()
