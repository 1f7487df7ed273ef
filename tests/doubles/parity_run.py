"""A run for the parity check: a run file, a weight log, and rollouts on a stream."""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import redis
from safetensors.torch import load_file

from parity_bench import ParityBench, groups_of, prompts
from penstock.deploy.launch.run_folder import save_run_file
from penstock.schemas.config import EnvironmentConfig, ModelConfig, RunConfig
from penstock.schemas.heartbeat import encode_heartbeat
from penstock.schemas.keys import Commit, Field, Keys, Kind
from penstock.schemas.prompt import Prompt
from penstock.schemas.rollout import RolloutGroup, encode_group, unpack_ids
from probed_engine import TOKENS, tokenizer
from weight_writer import WrittenLog
from wire_examples import heartbeat

NAME = "recorded"
NUM_TOKENS = 12


def make_bench(folder: Path) -> ParityBench:
    """Makes a bench with a tokenizer in its model's folder."""
    bench = ParityBench.make(folder, vocab_size=len(TOKENS))
    tokenizer().save_pretrained(bench.folder)
    return bench


def sampled_groups(bench: ParityBench, *, num_prompts: int = 4, first: int = 1, seed: int = 0) -> list[RolloutGroup]:
    """Samples groups that version 1 begins and version 2 ends, and groups of version 2 alone."""
    engine = bench.engine()
    asked = prompts(num_prompts, 6, seed)
    answers = engine.generate(asked, 4, NUM_TOKENS, version=1, updates={5: 2}, seed=seed)
    answers += engine.generate(asked, 4, NUM_TOKENS, version=2, seed=seed + 1)
    spelling = tokenizer()
    groups = [at_temperature_1(group) for group in groups_of(answers)]
    return [
        msgspec.structs.replace(group, index=first + n, prompt=Prompt(text=spelling.decode(context_of(group))))
        for n, group in enumerate(groups)
    ]


def at_temperature_1(group: RolloutGroup) -> RolloutGroup:
    return msgspec.structs.replace(group, sampling=msgspec.structs.replace(group.sampling, temperature=1.0))


def context_of(group: RolloutGroup) -> list[int]:
    segment = group.rollouts[0].segments[0]
    return unpack_ids(segment.token_ids)[: segment.loss_mask[0][0]].tolist()


class ParityRun:
    """Run `recorded` in `runs`, with what a trainer and a producer leave there and in Redis."""

    def __init__(self, runs: Path, bench: ParityBench, client: redis.Redis) -> None:
        self.runs, self.client, self.keys = runs, client, Keys(NAME)
        self.config = RunConfig(
            name=NAME, model=ModelConfig(path=str(bench.folder)), environment=EnvironmentConfig(path="nobody:Needed")
        )
        self.folder = self.config.folder(runs)
        save_run_file(self.config, self.folder)
        self.log = WrittenLog(client, self.keys)
        for version, file in bench.files.items():
            self.log.announce(version, load_file(file))
        self.commit(policy_version=2)

    def commit(self, *, policy_version: int, finished: bool = False) -> None:
        fields = {Commit.EPOCH: 0, Commit.VERSION: policy_version, Commit.ANNOUNCED + b"0": policy_version}
        self.client.hset(self.keys.commit, mapping=fields | ({Commit.FINISHED: 1} if finished else {}))

    def append(self, groups: Sequence[RolloutGroup]) -> None:
        for group in groups:
            self.append_payload(encode_group(group), group.index)

    def append_payload(self, payload: bytes, index: int) -> None:
        fields = {Field.INDEX: index, Field.KIND: Kind.GROUP, Field.PAYLOAD: payload}
        self.client.xadd(self.keys.rollouts, fields)

    def send_heartbeat(self) -> None:
        """Writes the heartbeat of a live producer."""
        sent = heartbeat("producer-0", policy_version=2, in_flight=(), sent_s=time.time())
        self.client.set(self.keys.producer("producer-0"), encode_heartbeat(sent), ex=60)
