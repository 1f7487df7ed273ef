"""Every part of a run gets its GPUs by a plain rule, and what does not fit them is refused with its sum."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from docs.sizing import SHAPES
from penstock.deploy import cli
from penstock.deploy.launch import start_checks
from penstock.deploy.launch.machine import Gpu, Machine
from penstock.deploy.launch.memory import ModelShape, read_shape
from penstock.deploy.launch.placement import Placement, place
from penstock.schemas.config import ConfigError, RunConfig, load_config

KUBERNETES = Path(__file__).parents[3] / "deploy" / "kubernetes"
# Qwen3-1.7B's shape.
SHAPE = ModelShape("m", 2048, 6144, 28, 16, 8, 128, 151936, tied=True, max_model_len=40960)
GB = 10**9
PAIRS = {"tensor_parallel_size": 2}


def gpu(index: int, total_gb: float = 80, free_gb: float | None = None, driver: str = "580.65") -> Gpu:
    free_gb = total_gb if free_gb is None else free_gb
    return Gpu(index, f"GPU-{index}", "H100", int(total_gb * GB), int(free_gb * GB), driver)


def machine(count: int, **fields: Any) -> Machine:
    return Machine(tuple(gpu(index, **fields) for index in range(count)), "13.0", needs_gpu=True)


def config(**tables: dict[str, Any]) -> RunConfig:
    document = {
        "name": "r",
        "model": {"path": "m", "dtype": "bfloat16"},
        "environment": {"path": "a:B"},
        "engine": {"max_model_len": 4096},
        "trainer": {"gradient_checkpointing": True},
    }
    for name, fields in tables.items():
        document[name] = document.get(name, {}) | fields
    return msgspec.convert(document, RunConfig)


def devices(placement: Placement) -> dict[str, list[int]]:
    """The GPUs of each part."""
    found: dict[str, list[int]] = {}
    for share in placement.shares:
        found.setdefault(share.part, []).append(share.gpu.number)
    return found


def test_ranks_come_first_and_engines_take_turns_on_what_is_left():
    for count, tables, expected in (
        (3, {}, {"trainer": [0], "producer-0": [1], "producer-1": [2]}),
        (2, {}, {"trainer": [0], "producer-0": [1], "producer-1": [1]}),
        (1, {}, {"trainer": [0], "producer-0": [0], "producer-1": [0]}),
        (4, {"trainer": {"num_processes": 2}}, {"trainer": [0, 1], "producer-0": [2], "producer-1": [3]}),
        (5, {"engine": PAIRS}, {"trainer": [0], "producer-0": [1, 2], "producer-1": [3, 4]}),
        (2, {"engine": PAIRS}, {"trainer": [0], "producer-0": [0, 1], "producer-1": [0, 1]}),
        (2, {"trainer": {"device": "cpu"}}, {"producer-0": [0], "producer-1": [1]}),
        (3, {"trainer": {"devices": [2]}}, {"trainer": [2], "producer-0": [0], "producer-1": [1]}),
        (3, {"producers": {"devices": [2]}}, {"trainer": [0], "producer-0": [2], "producer-1": [2]}),
    ):
        assert devices(place(config(**tables), machine(count), SHAPE)) == expected, (count, tables)


def test_each_part_sees_its_own_gpus_only_in_the_order_of_nvidia_smi():
    found = place(config(trainer={"num_processes": 2}), machine(4), SHAPE)
    assert found.environment("trainer") == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert found.environment("producer-1")["CUDA_VISIBLE_DEVICES"] == "3"
    assert found.options("producer-1") == ["--set", "engine.gpu_memory_utilization=0.9"]
    assert found.options("trainer") == []
    on_cpu = place(config(trainer={"device": "cpu"}), machine(1), SHAPE)
    assert on_cpu.environment("trainer") == {}
    nothing = place(config(), Machine(), None)
    assert (nothing, nothing.table(), nothing.environment("trainer")) == (Placement(), "", {})
    assert nothing.options("producer-0") == []


def test_one_gpu_is_split_between_trainer_and_engines():
    found = place(config(), machine(1, total_gb=141), SHAPE)
    trainer, first, second = found.shares
    assert found.is_shared and first.num_bytes == pytest.approx(second.num_bytes)
    total = trainer.num_bytes + first.num_bytes + second.num_bytes
    assert 0.88 * 141 * GB < total <= 0.9 * 141 * GB
    assert found.engine_fraction == pytest.approx(first.num_bytes / 141 / GB)
    alone = place(config(producers={"count": 1}), machine(2), SHAPE)
    assert not alone.is_shared and alone.engine_fraction == 0.9


def test_the_table_says_who_has_what_for_what():
    rows = place(config(producers={"count": 1}), machine(2), SHAPE).table().splitlines()
    assert rows[0].split() == ["GPU", "of", "GB", "who", "GB", "what", "for"]
    assert rows[1].startswith(
        "0    80.0   trainer     34.9  masters, gradients, moments 27.5 + gathered all the while 3.4"
    )
    assert rows[2] == "1    80.0   producer-0  72.0  weights 3.4 + KV cache and what a pass needs 68.6"
    unknown = place(config(producers={"count": 1}), machine(2), None).table().splitlines()
    assert unknown[1] == "0    80.0   trainer     ?     not known of this architecture"


# fmt: off
REFUSED = [
    ({"trainer": {"num_processes": 3}}, machine(2), r"trainer\.num_processes = 3: 2 GPUs \(0, 1\) here"),
    ({"trainer": {"devices": [0, 1]}}, machine(2), r"trainer\.devices = \[0, 1\]: expected 1 different numbers"),
    ({"trainer": {"devices": [1, 1], "num_processes": 2}}, machine(2), r"devices = \[1, 1\]: expected 2 different"),
    ({"trainer": {"devices": [4]}}, machine(2), r"trainer\.devices = \[4\]: no GPU 4; 2 GPUs \(0, 1\) here"),
    ({"trainer": {"devices": [0], "device": "cpu"}}, machine(2), r"devices = \[0\] with trainer\.device = 'cpu'"),
    ({"producers": {"devices": [7]}}, machine(1), r"producers\.devices = \[7\]: no GPU 7; 1 GPU \(0\) here"),
    ({"producers": {"devices": [0, 1, 2]}, "engine": PAIRS}, machine(3),
     r"producers\.devices = \[0, 1, 2\]: expected a multiple of the 2 .* \(engine\.tensor_parallel_size = 2\)"),
    ({"engine": {"tensor_parallel_size": 4}}, machine(2),
     r"engine\.tensor_parallel_size = 4: an engine takes 4 GPUs, and 2 GPUs \(0, 1\) here; expected at most"),
    ({"engine": PAIRS | {"args": {"pipeline_parallel_size": 2}}}, machine(2),
     r"size = 2 times engine\.args\.pipeline_parallel_size = 2: an engine takes 4 GPUs"),
    ({"engine": {"args": {"pipeline_parallel_size": "x"}}}, machine(2), r"parallel_size = 'x': expected 1 or more"),
    ({"trainer": {"device": "cuda"}}, Machine((), "13.0"), r"trainer\.device = 'cuda': torch finds no CUDA device"),
    ({"producers": {"devices": [0]}}, Machine(), r"devices = \[0\]: no GPU .* \(torch is a build for CPUs\)"),
    ({}, Machine((), "13.0", needs_gpu=True), r"installed vLLM is built for GPUs: none .* \(nvidia-smi finds none\)"),
    ({}, machine(2, driver="550.54.15"), r"driver 550\.54\.15, expected 580 or newer for torch's CUDA 13\.0"),
    # The trainer alone is too large.
    ({}, machine(2, total_gb=24),
     r"GPU 0 \(H100, 24\.0 GB\): 34\.9 GB needed, 24\.0 available \(all of it\): trainer 34\.9 \(masters, "
     r"gradients, moments 27\.5 \+ .*\); expected more ranks"),
    # Trainer and engines together.
    ({"engine": {"gpu_memory_utilization": 0.9}, "producers": {"count": 1}}, machine(1),
     r"GPU 0 .*: 106\.9 GB needed, 80\.0 available \(all of it\): trainer 34\.9 .*; producer-0 72\.0 .*; "
     r"expected a smaller engine\.gpu_memory_utilization"),
    # Somebody else's process.
    ({}, machine(3, free_gb=60),
     r"GPU 1 .*: 72\.0 GB needed, 60\.0 available \(other processes hold the rest\): producer-0 72"),
    # What the trainer leaves is too little for an engine.
    ({"engine": {"max_model_len": 40960}, "producers": {"count": 8}}, machine(1),
     r"engine\.gpu_memory_utilization = 0\.04 \(worked out\): 3\.2 GB of GPU 0 .* producer-0, .* least 8\.3: "
     r"weights 3\.4 \+ KV cache of one longest sequence 4\.7"),
]
# fmt: on


def test_what_the_machine_cannot_give_is_refused_with_its_sum():
    for tables, here, message in REFUSED:
        with pytest.raises(ConfigError, match=message):
            pytest.fail(f"{tables}: {place(config(**tables), here, SHAPE)}")


def test_a_trainer_of_unknown_size_shares_no_gpu_by_guess():
    with pytest.raises(ConfigError, match=r"engine\.gpu_memory_utilization is not set, and engines share GPU 0"):
        place(config(), machine(1), None)
    given = config(engine={"gpu_memory_utilization": 0.2})
    assert place(given, machine(1), None).engine_fraction == 0.2


def test_a_dry_run_shows_the_table_and_a_refusal_comes_before_anything_is_started(
    capsys, monkeypatch, model_folder, tmp_path
):
    monkeypatch.chdir(tmp_path)
    argv = ["run", "demo", "--set", f"model.path={model_folder}", "--set", "producers.count=1"]
    monkeypatch.setattr(start_checks, "read_machine", lambda: machine(2))
    assert cli.main([*argv, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert "producer-0" not in shown.out
    table = shown.err.splitlines()[:-1]
    assert [row.split()[:3] for row in table[1:]] == [["0", "80.0", "trainer"], ["1", "80.0", "producer-0"]]
    monkeypatch.setattr(start_checks, "read_machine", lambda: machine(2, free_gb=0.01))
    assert cli.main(argv) == 2
    assert "other processes hold the rest" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_reference_a_teacher_and_an_adapter_count(tmp_path):
    def needs(**tables: dict[str, Any]) -> dict[str, float]:
        return dict(place(config(**tables), machine(3), SHAPE).shares[0].needs)

    kl = {"kl_coefficient": 0.1}
    without, base = needs(), 2 * SHAPE.parameters
    for tables in ({"model": {"reference": "other"}}, {"advantage": kl}, {"objective": {"kwargs": kl}}):
        assert needs(**tables) == without | {"reference model": base}, tables
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 2, "num_attention_heads": 16}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"vocab_size": 151936}))
    teacher = read_shape(tmp_path)
    assert teacher is not None and teacher.parameters > 300e6
    assert needs(teacher={"model": str(tmp_path)}) == without | {"teacher": 2 * teacher.parameters}
    assert needs(teacher={"url": "http://127.0.0.1:1/v1"}) == without
    trained = needs(lora={"rank": 8, "targets": ["q_proj", "down_proj"]}, objective={"kwargs": kl})
    adapter = SHAPE.layers * 8 * (SHAPE.hidden + SHAPE.query_width + SHAPE.hidden + SHAPE.intermediate)
    assert (trained["base model"], trained["masters, gradients, moments"]) == (base, 16 * adapter)
    assert not {"reference model", "gathered all the while"} & trained.keys(), "the base is held once"
    assert trained["a block, or the head"] < without["a block, or the head"], "it has no gradients"


def test_the_run_file_for_gpus_that_ships_fits_the_gpus_it_names():
    shipped = load_config(KUBERNETES / "overlays" / "gpu" / "run.toml")
    (shape,) = (each for each in SHAPES if each.name == shipped.model.path.rpartition("/")[2])
    found = place(shipped, machine(3, total_gb=141), shape)
    assert devices(found) == {"trainer": [0], "producer-0": [1], "producer-1": [2]} and found.engine_fraction == 0.85
    assert round(found.shares[0].num_bytes / GB) == 77
    trainer = msgspec.structs.replace(shipped.trainer, num_processes=2)
    assert place(msgspec.structs.replace(shipped, trainer=trainer), machine(4), shape).shares
