"""Small random models of other architectures train by `penstock run`: the real engine, updates in flight, and the
parity gate on."""

import json
from pathlib import Path

import pytest
from transformers import GenerationConfig

from demo_run import DemoRun
from families import ROWS, small_model
from penstock.deploy.demo.char_tokenizer import build_tokenizer

pytestmark = [
    pytest.mark.vllm, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(900),
]  # fmt: skip

KINDS = (
    "gpt_oss", "deepseek_v3", "nemotron_h", "granitemoehybrid", "lfm2", "qwen3_next", "gemma2", "stablelm", "phi",
)  # fmt: skip
BY_EXPERT = {"deepseek_v3", "qwen3_next"}
"""Their experts are published one by one, so that the trainer keeps no older versions."""

ALLOWED = {"float32": 3e-5, "bfloat16": 5e-2}
"""Nats. An engine whose experts no update reached was at 6e-5 after two updates and at 5e-4 after four, in float32."""


def _save_model(kind: str, folder: Path) -> None:
    tokenizer = build_tokenizer(128)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    small_model(kind, **ends, vocab_size=len(tokenizer), bos_token_id=None).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    GenerationConfig(**ends, do_sample=True, temperature=1.0).save_pretrained(folder)


@pytest.mark.parametrize(
    "kind", ("qwen3_5_text", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in KINDS))
)
def test_an_architecture_trains_with_the_real_engine(tmp_path: Path, kind: str) -> None:
    family = next(family for family in ROWS if family.kind == kind)
    dtype = "bfloat16" if family.engine.startswith("bfloat16") else "float32"
    _save_model(kind, tmp_path / "model")
    settings = {"model.path": tmp_path / "model", "model.dtype": dtype, "num_updates": 6, "groups_per_batch": 8}
    settings |= {"producers.count": 1, "producers.groups_in_flight": 8, "metrics.port": 0}
    settings |= {"environment.kwargs.partial_credit": 0.9, "evaluation.num_prompts": 8}
    if kind in BY_EXPERT:
        settings |= {"max_lag": 0}  # the engine's gap is known of what is trained by the version that sampled it
    else:
        settings |= {"correction.proximal": "sampled_version"}  # it is known after every update
    run = DemoRun(tmp_path, kind, **settings)
    try:
        run.start(fresh=False)
        assert run.wait() == 0, run.output()
    finally:
        run.stop()
    updates = [json.loads(line) for line in (run.folder / "updates.jsonl").read_text().splitlines()]
    gaps = {update["update"]: update["mismatch_lag0"] for update in updates if "mismatch_lag0" in update}
    print(kind, dtype, gaps)
    assert len(updates) == 6 and max(gaps) > 2, gaps
    assert max(gaps.values()) < ALLOWED[dtype], gaps
    log = (run.folder / "logs" / "trainer.log").read_text()
    assert ("padded to a rectangle" in log) == (family.rows == "in rectangles")
