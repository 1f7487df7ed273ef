"""The GPUs of a machine, as nvidia-smi and the installed torch tell of them."""

from pathlib import Path

import pytest

from penstock.deploy.launch import machine
from penstock.deploy.launch.machine import Machine, read_machine
from penstock.schemas.config import ConfigError

LISTED = """\
0, GPU-aaaa-1, NVIDIA H100 80GB HBM3, 81559, 81000, 580.65.06
1, GPU-bbbb-2, NVIDIA H100 80GB HBM3, 81559, 1024, 580.65.06
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a torch of some build and an nvidia-smi that says and does something onto the machine."""

    def put(script: str | None, cuda: str = "'13.0'") -> None:
        torch = tmp_path / "torch"
        torch.mkdir(exist_ok=True)
        (torch / "__init__.py").write_text("raise AssertionError('imported')\n")
        (torch / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\nhip = None\n")
        spec = machine.importlib.util.spec_from_file_location("torch", torch / "__init__.py")
        monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: spec)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        (tmp_path / "nvidia-smi").unlink(missing_ok=True)
        if script is not None:
            (tmp_path / "listed").write_text(LISTED)
            (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncd {tmp_path}\n{script}\n")
            (tmp_path / "nvidia-smi").chmod(0o755)

    return put


TELL = 'while read -r line; do echo "$line"; done < listed'


def test_visible_gpus_are_read_with_their_memory_and_driver_in_their_order(installed, monkeypatch):
    installed(TELL)
    found = read_machine()
    assert [gpu.number for gpu in found.gpus] == [0, 1] and found.cuda == "13.0"
    gpu = found.gpus[1]
    assert (gpu.uuid, gpu.name, gpu.driver) == ("GPU-bbbb-2", "NVIDIA H100 80GB HBM3", "580.65.06")
    assert (gpu.total_bytes, gpu.free_bytes) == (81559 * 2**20, 2**30)
    numbers = {"1": [1], "1,0": [1, 0], "GPU-bbbb": [1], "": [], " 0 , GPU-bbbb-2 ": [0, 1]}
    for visible, expected in numbers.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [gpu.number for gpu in read_machine().gpus] == expected, visible
    for visible in ("2", "GPU-", "MIG-aaaa"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(ConfigError, match=rf"CUDA_VISIBLE_DEVICES names '{visible}': .* \(0, 1\)"):
            read_machine()


def test_without_cuda_in_torch_nothing_is_asked_and_without_nvidia_smi_there_is_no_gpu(installed):
    installed("exit 1", cuda="None")
    assert read_machine() == Machine()
    installed(None)
    assert read_machine().gpus == ()


def test_an_answer_that_is_no_list_is_quoted(installed):
    for script, said in (
        ("echo 'Driver/library version mismatch' >&2; exit 18", "status 18: Driver/library version mismatch"),
        ("echo '0, GPU-aaaa-1, NVIDIA GB10, [N/A], [N/A], 580.1'", r"NVIDIA GB10, \[N/A\].* expected index, uuid"),
    ):
        installed(script)
        with pytest.raises(ConfigError, match=said):
            read_machine()
