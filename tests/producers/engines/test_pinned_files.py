"""Files of weights are page-locked once for a GPU, and let go of when others take their place."""

import mmap
import os
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from waiting import wait_for

pytestmark = [pytest.mark.vllm]

WEIGHTS = {
    "b.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "a.weight": torch.arange(6).to(torch.bfloat16).view(2, 3),
    "a.bias": torch.ones(5, dtype=torch.bfloat16),
    "a.nothing": torch.zeros(0, dtype=torch.bfloat16),
}


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Importing vLLM and torch's compiler raises deprecation warnings of their own."""
    with warnings.catch_warnings(action="ignore"):
        import penstock.producers.engines.weight_transfer  # noqa: F401


def plain(paths: list[str]):
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)


class Driver:
    """Stands in for CUDA's registration of host memory: `locked` are the ranges that it holds."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.num_calls = 0
        self.refuses = False

    def register(self, start: int, size: int) -> bool:
        self.num_calls += 1
        if not self.refuses:
            self.locked[start] = size
        return not self.refuses

    def unregister(self, start: int) -> None:
        del self.locked[start]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    from penstock.producers.engines import pinned_files

    made = Driver()
    monkeypatch.setattr(pinned_files, "host_register", made.register)
    monkeypatch.setattr(pinned_files, "host_unregister", made.unregister)
    monkeypatch.setattr(pinned_files, "RELEASE_S", 0.01)
    return made


@pytest.fixture
def files(driver: Driver):
    from penstock.producers.engines.pinned_files import PinnedFiles

    return PinnedFiles(plain)


@pytest.fixture
def path(tmp_path: Path) -> str:
    save_file(WEIGHTS, tmp_path / "weights.safetensors", {"format": "pt"})
    return str(tmp_path / "weights.safetensors")


def read(files, *paths: str) -> dict[str, torch.Tensor]:
    with files.reading(list(paths)) as tensors:
        return {name: tensor.clone() for name, tensor in tensors}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_tensors_are_those_that_safetensors_reads_in_file_order(files, path: str) -> None:
    with files.reading([path]) as tensors:
        assert [name for name, _ in tensors] == [name for name, _ in plain([path])]
    assert_equal(read(files, path), WEIGHTS)


def test_a_file_that_others_patch_is_locked_once_and_read_as_it_is(files, driver: Driver, path: str) -> None:
    assert_equal(read(files, path), WEIGHTS)
    newer = WEIGHTS | {"a.bias": torch.full((5,), 7.0, dtype=torch.bfloat16)}
    save_file(newer, path + ".newer", {"format": "pt"})
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as patched:
        patched[:] = Path(path + ".newer").read_bytes()
    assert_equal(read(files, path), newer)
    assert driver.num_calls == 1 and list(driver.locked.values()) == [os.path.getsize(path)]


def test_a_file_in_anothers_place_is_locked_and_the_other_let_go_of(files, driver: Driver, path: str) -> None:
    read(files, path)
    newer = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    save_file(newer, path + ".newer", {"format": "pt"})
    os.replace(path + ".newer", path)
    assert_equal(read(files, path), newer)
    assert driver.num_calls == 2 and len(driver.locked) == 1


def test_a_file_that_is_removed_is_let_go_of_without_another_load(files, driver: Driver, path: str) -> None:
    read(files, path)
    held = f"{path} (deleted)"
    os.unlink(path)
    wait_for(lambda: not driver.locked and held not in Path("/proc/self/maps").read_text())


def test_nothing_is_let_go_of_while_it_is_read(files, driver: Driver, path: str) -> None:
    with files.reading([path]) as tensors:
        first = next(tensors)
        os.unlink(path)
        time.sleep(0.05)
        assert driver.locked
        assert_equal(dict([first, *tensors]), WEIGHTS)
    wait_for(lambda: not driver.locked)


def test_memory_that_cannot_be_locked_is_read_all_the_same(files, driver: Driver, path: str) -> None:
    driver.refuses = True
    assert_equal(read(files, path), WEIGHTS)
    os.unlink(path)  # what was not locked is not unlocked
    wait_for(lambda: files._files == {})


def test_a_file_that_may_not_be_written_to_is_read_by_safetensors(files, driver, path: str, monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert_equal(read(files, path), WEIGHTS)
    assert driver.num_calls == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_engine_locks_its_files_on_a_gpu_alone(device: str, driver: Driver, path: str) -> None:
    from penstock.producers.engines.weight_transfer import (
        SafetensorsInitInfo,
        SafetensorsTransferEngine,
        SafetensorsUpdateInfo,
    )

    loaded: dict[str, torch.Tensor] = {}
    engine = SafetensorsTransferEngine.__new__(SafetensorsTransferEngine)
    engine.device = torch.device(device)
    engine.model = SimpleNamespace(load_weights=loaded.update)
    engine.init_transfer_engine(SafetensorsInitInfo())
    for _ in range(2):
        engine.receive_weights(SafetensorsUpdateInfo(paths=[path]))
    assert_equal(loaded, WEIGHTS)
    assert driver.num_calls == (device == "cuda")


@pytest.mark.gpu
def test_a_gpu_reads_locked_pages(path: str) -> None:
    from penstock.producers.engines.pinned_files import PinnedFiles

    files = PinnedFiles(plain)
    with files.reading([path]) as tensors:
        assert_equal({name: tensor.to("cuda").cpu() for name, tensor in tensors}, WEIGHTS)
    assert files._files[path]._is_locked
