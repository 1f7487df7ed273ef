"""A writer and a reader that stream as PipelineRL does, for comparison: a pickled record per XADD, XREAD COUNT 1.

A record holds one rollout, as in PipelineRL's first releases, or a list of a group's rollouts, as its actor writes them
since. A rollout is a dictionary with the field names of its `TrainingText`: token ids, labels and logprobs as lists or,
in a variant, as arrays. The reader trusts what it reads (a pickle), acknowledges nothing and checks nothing but the
running number. Other work of PipelineRL is left out, in its favor: pydantic's dump of every rollout, tensors
made of the lists, a second crossing between its preprocessor and its trainer.
"""

import pickle
from typing import Any, Literal

import numpy as np
import redis

from bench.pipeline.records import GROUP_SIZE
from penstock.schemas.rollout import RolloutGroup, unpack_floats, unpack_ids

Form = Literal["lists", "arrays"]
BLOCK_MS = 100
MAX_ENTRIES = 1_000_000
CHARACTERS_PER_TOKEN = 4


def texts_of(group: RolloutGroup, form: Form) -> list[dict[str, Any]]:
    """Returns a group's rollouts as PipelineRL writes them. Not timed."""
    return [_text_of(group, n, form) for n in range(GROUP_SIZE)]


def _text_of(group: RolloutGroup, n: int, form: Form) -> dict[str, Any]:
    segment = group.rollouts[n].segments[0]
    ids: Any = list(unpack_ids(segment.token_ids))
    logprobs: Any = list(unpack_floats(segment.behavior_logprobs))
    num_prompt_tokens = len(ids) - len(logprobs)
    labels: Any = [-100] * num_prompt_tokens + ids[num_prompt_tokens:]
    if form == "arrays":
        ids, labels = np.array(ids, dtype=np.int32), np.array(labels, dtype=np.int32)
        logprobs = np.array(logprobs, dtype=np.float32)
    return {
        "text": "x" * (CHARACTERS_PER_TOKEN * len(labels)),
        "n_predicted": len(logprobs),
        "reward": group.rollouts[n].reward.value,
        "logprobs": logprobs,
        "ref_logprobs": [],
        "input_ids": ids,
        "labels": labels,
        "group_id": str(group.index),
        "finished": True,
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": len(logprobs),
        "metadata": {"model_version": 1000, "rollout_index": n, "step_index": 0},
    }


class PeerWriter:
    def __init__(self, client: "redis.Redis", stream: str) -> None:
        self._client = client
        self._stream = stream
        self._index = 0

    def write(self, record: Any) -> None:
        fields: dict[Any, Any] = {"index": self._index, "data": pickle.dumps(record)}
        self._client.xadd(self._stream, fields, maxlen=MAX_ENTRIES, approximate=True)
        self._index += 1


class PeerReader:
    def __init__(self, client: "redis.Redis", stream: str) -> None:
        self._client = client
        self._stream = stream
        self._last_id: bytes | int = 0
        self._index = 0

    def read(self) -> Any:
        """Waits for the next record; a writer that appends one unblocks it."""
        while True:
            reply: Any = self._client.xread({self._stream: self._last_id}, count=1, block=BLOCK_MS)
            if reply:
                break
        ((entry_id, entry),) = reply[0][1]
        if int(entry[b"index"]) != self._index:
            raise RuntimeError(f"entry {int(entry[b'index'])} of {self._stream}, expected {self._index}")
        self._last_id = entry_id
        self._index += 1
        return pickle.loads(entry[b"data"])
