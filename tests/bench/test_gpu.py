"""The GPU check: every measurement without an engine at toy size on the CPU, what its figures are made of, and the
scripts that carry it to a machine without a network."""

import importlib.util
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console

from bench.gpu import __main__ as command
from bench.gpu import section
from bench.gpu.part import (
    HeadJob,
    KernelFound,
    LoadFound,
    PolicyJob,
    TrainerFound,
    TrainerJob,
    measure_head,
    measure_trainer,
    measure_weights,
    update_flops,
)
from bench.gpu.section import (
    GPU,
    TINY,
    TOY,
    GpuSettings,
    demo_figures,
    head_figures,
    kernel_figure,
    load_figure,
    passed_figure,
    trainer_figures,
    weights_figures,
)
from bench.gpu.trim import trim
from bench.result import BenchError, Result, print_result, write_result
from bench.section import Bench
from penstock.deploy.launch.redis_server import ServerError

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "bench" / "gpu"


def through_json(job: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(job), type=type(job))


def bench(tmp_path: Path, settings: GpuSettings = TOY) -> Bench:
    return Bench(settings, command.RUN_FILE, tmp_path)


def test_the_head_is_measured_against_a_matrix_product() -> None:
    job = HeadJob(device="cpu", num_tokens=32, hidden_size=16, vocabulary=40, gemm_size=32, rounds=3)
    found = measure_head(through_json(job))
    assert found.gemm_tflops > 0
    for figure, products in zip(head_figures(job, found), (4, 3), strict=True):
        seconds = figure.details["seconds"]
        assert len(seconds) == 3 and min(seconds) > 0
        assert figure.measured == pytest.approx(products * 2 * 32 * 16 * 40 / sorted(seconds)[1] / 1e12)
        assert figure.ratio == pytest.approx(figure.measured / found.gemm_tflops)
        assert str(figure.goal) == "≥ 0.75"


def test_an_update_of_the_trainer_is_measured_with_its_peak_of_memory(tmp_path: Path) -> None:
    job = TrainerJob(
        device="cpu", folder=str(tmp_path / "m"), shape=TINY, row_tokens=16, num_rows=4, tokens_per_pass=32,
        gemm_size=32, rounds=2,
    )  # fmt: skip
    found = measure_trainer(through_json(job))
    assert found.num_tokens == 64 and len(found.seconds) == 2 and found.peak_bytes > 0
    assert found.flops == update_flops(TINY, 16, 4) and found.peak_tflops is None
    assert {"forward", "backward", "optimizer"} <= set(found.phase_s)
    mfu, memory = trainer_figures("tiny", found, formula_gb=0.5)
    assert mfu.ratio == pytest.approx(mfu.details["share_of_matrix_product"])
    assert mfu.details["tokens_per_s"] == pytest.approx(64 / (sum(found.seconds) / 2))
    assert memory.ratio == pytest.approx(found.peak_bytes / 0.5e9)


def test_model_flops_are_held_against_the_data_sheet_where_it_is_known() -> None:
    found = TrainerFound(
        gemm_tflops=700.0, peak_tflops=989.0, num_tokens=1, flops=4.45e14, seconds=[1.0], peak_bytes=1, phase_s={}
    )
    figure, _ = trainer_figures("m", found, 1.0)
    assert figure.ratio == pytest.approx(445 / 989) and figure.reached is False
    assert figure.reference_is == "the device's peak in bfloat16"


def test_model_flops_count_what_a_transformers_model_multiplies(tmp_path: Path) -> None:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    from bench.sizing import save_random

    save_random(TINY, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(0, TINY.vocabulary, (2, 24)), use_cache=False).logits.sum().backward()
    # Half the pairs of tokens are masked, and the head of the last token of a row is not needed.
    eager_pairs = 24 * 24 - 24 * 25 / 2
    not_needed = 12.0 * TINY.layers * TINY.query_width * eager_pairs + 6.0 * TINY.vocabulary * TINY.hidden
    assert counter.get_total_flops() == pytest.approx(update_flops(TINY, 24, 2) + 2 * not_needed)


def test_a_snapshot_and_a_delta_are_measured_against_a_copy(tmp_path: Path) -> None:
    job = PolicyJob(device="cpu", folder=str(tmp_path), num_bytes=200_000, rounds=3)
    found = measure_weights(through_json(job))
    assert len(found.snapshot_s) == len(found.write_s) == 3
    assert 0 < found.num_bytes < 0.05 * job.num_bytes  # a delta, not the whole
    snapshot, delta = weights_figures(job, found)
    assert snapshot.measured == pytest.approx(200_000 / sorted(found.snapshot_s)[1] / 1e9)
    assert snapshot.goal is not None and delta.goal is None
    assert delta.reference == snapshot.reference == found.to_host_bytes_per_s / 1e9


def test_a_policy_is_read_from_a_file_as_an_engine_reads_it(tmp_path: Path) -> None:
    job = PolicyJob(device="cpu", folder=str(tmp_path), num_bytes=64_000, rounds=3)
    found = LoadFound(pinned_s=[2e-6, 1e-6, 4e-6], mapped_s=[8e-6], buffer_s=[1e-6])
    assert through_json(job) == job
    figure = load_figure(job, found)
    assert figure.measured == pytest.approx(32) and figure.ratio == pytest.approx(0.5) and figure.reached is False
    assert figure.details["pages_not_locked"] == pytest.approx(8)


def test_an_operator_may_be_as_wrong_as_bfloat16_rounds() -> None:
    assert kernel_figure(KernelFound(version="1", error=2.0**-9)).reached
    assert not kernel_figure(KernelFound(version="1", error=2.0**-7)).reached


@pytest.mark.parametrize("row", ["kernel", "load", "labels", "demo", "pause", "producer"])
def test_without_vllm_the_engines_rows_say_so(row: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (figure,) = GPU.rows[row](bench(tmp_path))
    assert figure.name == f"{row}: not measured" and figure.details == {"reason": "vLLM is not installed"}


def test_a_row_that_fails_says_why_and_the_others_go_on(tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BenchError("head ended with status 1; its log ends:\nCUDA error")

    monkeypatch.setattr(section, "measure_apart", fail)
    (figure,) = GPU.rows["head"](bench(tmp_path))
    assert "CUDA error" in figure.details["reason"] and figure.reached is False
    output = Console(width=100, record=True, file=io.StringIO())
    machine = {"processor": "p", "num_cores_usable": 1, "load_average_before": [0.0]}
    print_result(
        Result(section="gpu", date="2031-01-01", machine=machine, settings={}, wall_s=1.0, figures=(figure,)), output
    )
    assert "head: failed: head ended with status 1; its log ends:" in output.export_text()


@pytest.mark.parametrize("error", [ServerError("no server"), torch.OutOfMemoryError("no room"), OSError("full")])
def test_a_row_without_a_server_or_room_is_left_out(error: Exception, tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(section, "random_model", fail)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    (figure,) = GPU.rows["producer"](bench(tmp_path))
    assert figure.details["reason"] == f"{type(error).__name__}: {error}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path, capsys) -> None:
    (figure,) = GPU.rows["head"](bench(tmp_path, GPU.settings))
    assert figure.details == {"reason": "torch finds no CUDA device"}
    assert command.main(["--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "bench.gpu: torch finds no CUDA device; expected an NVIDIA GPU, or --toy\n"
    assert not list(tmp_path.iterdir())


def test_a_model_that_does_not_fit_is_left_out_with_its_sum(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 10**9))
    settings = msgspec.structs.replace(GPU.settings, trainer_shapes=GPU.settings.trainer_shapes[2:])
    (figure,) = section.measure_trainer(bench(tmp_path, settings))
    assert figure.details == {"reason": "77 GB needed, 90% of 80 GB there"}


def test_tests_that_ran_are_counted_and_those_that_failed_named(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        '<testsuites><testsuite tests="5" skipped="1" failures="1" errors="1"><testcase classname="a" name="one"/>'
        '<testcase classname="a" name="two"><failure/></testcase><testcase classname="b" name="three"><error/>'
        '</testcase><testcase classname="b" name="four"><skipped/></testcase></testsuite></testsuites>'
    )
    figure = passed_figure("tests", report)
    assert (figure.measured, figure.reference, figure.reached) == (2.0, 4.0, False)
    assert figure.details == {"num_skipped": 1, "failed": ["a::two", "b::three"]}
    report.write_text('<testsuites><testsuite tests="7" skipped="7" failures="0" errors="0"/></testsuites>')
    assert passed_figure("tests", report).details == {"reason": "7 tests skipped, none ran"}


def test_the_tests_that_need_a_gpu_are_found_and_run(tmp_path: Path, monkeypatch) -> None:
    commands = []
    monkeypatch.setattr(section, "Child", lambda name, command, **_: commands.append(command))
    monkeypatch.setattr(section, "wait_for", lambda children: None)
    monkeypatch.setattr(section, "passed_figure", lambda name, report: name)
    section.measure_tests(bench(tmp_path))
    assert commands[0][-2:] == ["-m", "gpu"]
    files = {Path(word).name for word in commands[0] if word.endswith(".py")}
    assert {"test_attention.py", "test_head.py", "test_on_gpu.py"} <= files and "test_learner.py" not in files


def test_tests_that_leave_no_report_are_not_judged_by_that_of_another_row(tmp_path: Path, monkeypatch) -> None:
    def fail(children: list) -> None:
        raise BenchError("pytest ended with signal SIGSEGV")

    (tmp_path / "tests.xml").write_text('<testsuite tests="9" skipped="0" failures="0" errors="0"/>')
    monkeypatch.setattr(section, "Child", lambda *_, **__: None)
    monkeypatch.setattr(section, "wait_for", fail)
    with pytest.raises(BenchError, match="SIGSEGV"):
        section.measure_labels(bench(tmp_path))


def test_the_demo_is_judged_by_its_gate_and_by_what_it_learned(tmp_path: Path) -> None:
    report = {
        "dtype": "bfloat16",
        "verdict": {"status": "parity", "cause": "parity", "sentence": "They agree."},
        "hypotheses": [{"name": "processed", "gap": {"num_tokens": 9, "mean": 0.01, "p99": 0.1, "max": 1.0}}],
    }
    (tmp_path / "parity.json").write_text(json.dumps(report))
    point = {"policy_version": 10, "update": 10, "num_prompts": 256, "time_s": 1.0}
    lines = [point | {"reward": 0.4}, point | {"update": 20, "policy_version": 20, "reward": 0.93}]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    gate, learned = demo_figures(tmp_path)
    assert gate.ratio == pytest.approx(0.2) and gate.reached and gate.details["status"] == "parity"
    assert learned.measured == 0.93 and learned.reached


def test_a_result_is_named_after_date_and_device(tmp_path: Path) -> None:
    result = Result(section="gpu", date="2031-05-06T07:08:09", machine={}, settings={}, wall_s=1.0, figures=())
    device = command.short_name("NVIDIA H100 80GB HBM3, 86 GB, driver 580.65")
    assert write_result(result, tmp_path, device=device).name == "gpu-2031-05-06-h100-80gb-hbm3.json"


def test_what_is_packed_covers_what_penstock_needs() -> None:
    """The rest is on a machine with transformers, or draws pictures."""
    words = (SCRIPTS / "pack.sh").read_text(encoding="utf-8").partition('SMALL="')[2].partition('"')[0].split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {requirement.partition(">")[0] for requirement in project["dependencies"]}
    there = {"aiohttp", "fsspec", "huggingface-hub", "matplotlib", "numpy", "prometheus-client", "safetensors"}
    assert needed - set(words) == there | {"tokenizers", "torch", "transformers"}


def write_wheel(folder: Path, name: str, files: dict[str, str]) -> Path:
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    whole = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, text in whole.items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in [*whole, f"{info}/RECORD"]))
    return wheel


def test_a_packed_machine_is_put_together_without_a_network(tmp_path: Path) -> None:
    wheels, parts, target = (tmp_path / name for name in ("wheels", "parts", "target"))
    wheels.mkdir(), parts.mkdir()
    small = write_wheel(wheels, "small", {"small/__init__.py": ""})
    kernels = {
        "vllm/__init__.py": "",
        "vllm/_moe_C_stable_libtorch.abi3.so": "kernels",
        "vllm/third_party/pynvml.py": "",
    }
    vllm = write_wheel(wheels, "vllm", kernels)
    trim(vllm)
    with tarfile.open(parts / "small.tar.gz", "w:gz") as archive:
        archive.add(small, small.name)
    with tarfile.open(tmp_path / "vllm.tar.gz", "w:gz") as archive:
        archive.add(vllm, vllm.name)
    whole = (tmp_path / "vllm.tar.gz").read_bytes()
    for number, start in enumerate(range(0, len(whole), 400)):
        (parts / f"vllm.tar.gz.{number:02}").write_bytes(whole[start : start + 400])
    script = tmp_path / "checkout" / "bench" / "gpu" / "unpack.sh"
    script.parent.mkdir(parents=True)
    shutil.copy(SCRIPTS / "unpack.sh", script)
    (tmp_path / "checkout" / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "penstock"\nversion = "1"\n[tool.setuptools]\npackages = ["bench.gpu"]\n'
    )
    (script.parent / "__init__.py").touch()
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    done = subprocess.run([script, parts, target], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"PYTHONPATH={target} {sys.executable} -m bench.gpu" in done.stdout
    assert (target / "bench" / "gpu" / "__init__.py").exists()
    assert (target / "small" / "__init__.py").exists() and (target / "vllm" / "third_party" / "pynvml.py").exists()
    assert not (target / "vllm" / "_moe_C_stable_libtorch.abi3.so").exists()
