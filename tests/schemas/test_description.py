"""What a run says of itself in Redis: enough for a producer, nothing secret."""

import zlib
from pathlib import Path

import msgspec
import pytest

from penstock.schemas import description
from penstock.schemas.config import ConfigError, EnvironmentConfig, ModelConfig, RunConfig, config_of, load_config
from penstock.schemas.description import (
    DescriptionError,
    RunDescription,
    decode_description,
    describe,
    encode_description,
)
from penstock.schemas.model_digest import model_digest

RUN_FILE = """
name = "test"
[model]
path = "{model}"
[environment]
path = "my_lab:Task"
[environment.kwargs]
width = 2
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "original").mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "tokenizer.model"):
        (folder / name).write_bytes(f"{name} \0\xff".encode("latin-1"))
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", ".hidden", "original/x"):
        (folder / name).write_text("large or of no use")
    return folder


def config_with(model: Path) -> RunConfig:
    return RunConfig(name="test", model=ModelConfig(path=str(model)), environment=EnvironmentConfig(path="my_lab:Task"))


def stored(run: RunDescription) -> dict[bytes, bytes]:
    """As Redis returns it."""
    return {name.encode(): value for name, value in encode_description(run).items()}


def test_a_description_holds_the_run_file_and_all_of_the_model_but_its_weights(model: Path) -> None:
    config = config_with(model)
    found = decode_description(stored(describe(config)))
    assert found == describe(config)
    assert config_of(msgspec.json.decode(found.run_file), Path("redis")) == config
    assert found.model_digest == model_digest(model)
    kept = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "tokenizer.model"}
    assert found.model_files == {name: (model / name).read_bytes() for name in kept}


def test_fields_of_a_table_that_the_run_file_lacks_can_be_set_by_whoever_joins(model: Path) -> None:
    document = msgspec.json.decode(describe(config_with(model)).run_file)
    assert document["endpoint"] is None
    joined = config_of(document, Path("redis"), ["endpoint.port=0", "producers.groups_in_flight=3"])
    assert joined.endpoint is not None and joined.endpoint.port == 0 and joined.producers.groups_in_flight == 3


def test_files_too_large_for_redis_are_refused_by_name_and_size(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "LARGEST_FILES_BYTES", 100)
    describe(config_with(model))
    (model / "notes.txt").write_text("x" * 90)
    with pytest.raises(ConfigError, match=r"model.path = .* bytes beside the weights, .* notes.txt with 90; .* 100"):
        describe(config_with(model))


def test_what_is_no_description_is_named(model: Path) -> None:
    fields = stored(describe(config_with(model)))
    for name in ("../config.json", "/etc/passwd", "a/b", "..", ""):
        run = RunDescription(run_file=b"{}", model_digest="d", model_files={name: b"x"})
        with pytest.raises(DescriptionError, match=r"expected a name without a folder"):
            decode_description(stored(run))
    for field, value, message in [
        (b"model_files", b"not compressed", r"error: Error -3 while decompressing"),
        (b"model_files", zlib.compress(b"no msgpack"), r"(Validation|Decode)Error: "),
        (b"model_digest", b"\xff", r"UnicodeDecodeError: "),
        (b"run_file", None, r"KeyError: b'run_file'"),
    ]:
        others = {name: stored for name, stored in fields.items() if name != field}
        with pytest.raises(DescriptionError, match=message):
            decode_description(others if value is None else others | {field: value})


def test_nothing_secret_gets_into_a_run_file_and_so_into_redis(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN_FILE.format(model=tmp_path))
    for setting, message in [
        ('redis.url = "redis://:sesame@host"', "redis.url holds a password"),
        ('engine.args.hf_token = "sesame"', "engine.args.hf_token holds a key"),
        ('weights.anchors = "s3://me:sesame@bucket/runs"', "weights.anchors holds a user or a key"),
    ]:
        with pytest.raises(ConfigError, match=message) as refused:
            load_config(file, [setting])
        assert "sesame" not in str(refused.value)
