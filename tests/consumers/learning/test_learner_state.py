"""Masters and moments as files: written by some ranks, read by as many others."""

import json
from pathlib import Path

import pytest

from forked_programs import ForkedProgram

SIZES = (1, 2, 4)
PROGRAM = """
import hashlib, json, resource, sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from penstock.consumers.learning.model.learner_state import LearnerState
from penstock.consumers.learning.model.packed_model import PackedModel
from penstock.consumers.learning.ranks import Ranks

rank, size, store, saved, *sources = sys.argv[1:]


class Gloo(Ranks):
    def __init__(self):
        self.rank, self.size = int(rank), int(size)
        if self.size > 1:
            dist.init_process_group("gloo", store=dist.FileStore(store, self.size), rank=self.rank,
                                    world_size=self.size, timeout=timedelta(seconds=60))
            self.mesh = init_device_mesh("cpu", (self.size,))
            self.group = dist.new_group(timeout=timedelta(seconds=60))

    def for_thread(self, thread):
        return self


class Model(nn.Module):
    # 5 rows and 3: some ranks have less than others, and some nothing.
    state, lora = PackedModel.state, None

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.last = nn.Linear(3, 5), nn.LayerNorm(3), nn.Linear(5, 3)
        self.unused = nn.Linear(7, 2)
        self.last.weight = nn.Parameter(self.first.weight.detach().T.contiguous())
        self.tied = self.last
        self.register_buffer("scale", torch.tensor(float(seed)))
        if ranks.mesh is not None:
            fully_shard(self, mesh=ranks.mesh)

    @property
    def module(self):
        return self

    def at_rest(self):
        return self

    def forward(self, x):
        return self.last(self.first(self.norm(x))) * self.scale


def opened(seed):
    model = Model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    return model, optimizer, LearnerState(model, optimizer, ranks)


def found(model, optimizer):
    hashed = hashlib.blake2b()
    for name, parameter in sorted(model.state().items()):
        moments = optimizer.state.get(parameter, {})
        for key, value in sorted({"master": parameter, **moments}.items()):
            assert value.device.type == "cpu" and (value is parameter or not value.requires_grad)
            hashed.update(f"{name} {key}".encode())
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            hashed.update(whole.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


ranks = Gloo()
model, optimizer, state = opened(1)
for _ in range(2):
    model(torch.ones(2, 3)).square().sum().backward()
    model.unused.bias.grad = None
    optimizer.step()
    optimizer.zero_grad()
digests = {}
if not sources:
    before = found(model, optimizer)
    writing = state.begin(Path(saved))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()  # while it is written
    sums = writing.result()
    assert len(sums) == (ranks.size if ranks.is_lead else 0), sums
    digests["written"] = before
    if ranks.rank == ranks.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    try:
        state.begin(Path(saved + "-full")).result()
    except OSError as error:
        digests["full"] = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
for source in sources:
    model, optimizer, state = opened(2)
    state.load(Path(source))
    digests[source] = found(model, optimizer)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
Path(f"{store}.{rank}").write_text(json.dumps(digests))
"""


class Worlds:
    """Runs `PROGRAM` on several ranks, and returns what each has found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._num = 0

    def run(self, size: int, *sources: str) -> list[dict[str, str]]:
        self._num += 1
        store = self.folder / f"store-{self._num}"
        environment = {"OMP_NUM_THREADS": "1"}
        arguments = [str(size), str(store), str(self.folder / f"saved-{size}"), *sources]
        logs = [self.folder / f"log-{self._num}-{rank}" for rank in range(size)]
        processes = [ForkedProgram(PROGRAM, [str(rank), *arguments], environment, log) for rank, log in enumerate(logs)]
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(120) == 0, log.read_text()
        return [json.loads(Path(f"{store}.{rank}").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("worlds"))


@pytest.fixture(scope="module")
def written(worlds: Worlds) -> dict[int, list[dict[str, str]]]:
    return {size: worlds.run(size) for size in SIZES}


@pytest.mark.parametrize("size", SIZES)
def test_what_some_ranks_wrote_any_number_of_ranks_reads_back(worlds, written, size) -> None:
    sources = [str(worlds.folder / f"saved-{source}") for source in SIZES]
    expected = {str(worlds.folder / f"saved-{source}"): written[source][0]["written"] for source in SIZES}
    assert worlds.run(size, *sources) == [expected] * size


@pytest.mark.parametrize("size", SIZES)
def test_a_disk_that_is_full_for_one_rank_is_an_error_on_all(written, size) -> None:
    found = {rank["full"] for rank in written[size]}
    assert len(found) == 1 and "27" in found.pop()
    assert size == 1 or all(f"rank {size - 1}: " in rank["full"] for rank in written[size])
