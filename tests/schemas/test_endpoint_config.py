"""The run file's [endpoint] table: there or not, and wrong values named."""

from pathlib import Path

import pytest

from penstock.schemas.config import ConfigError, EndpointConfig, load_config

RUN = 'name = "run-1"\nmodel.path = "some/model"\nenvironment.path = "pkg.mod:Env"\n'


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    return file


def test_a_run_has_no_endpoint_unless_it_says_so(run_file: Path) -> None:
    assert load_config(run_file).endpoint is None
    run_file.write_text(RUN + "[endpoint]\n")
    assert load_config(run_file).endpoint == EndpointConfig()
    assert EndpointConfig().host == "127.0.0.1"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("endpoint.port=70000", r"endpoint.port = 70000"),
        ("endpoint.idle_timeout_s=0", r"endpoint.idle_timeout_s = 0"),
        ("endpoint.api_key=secret", r"endpoint.api_key: unknown field"),
    ],
)
def test_a_wrong_value_is_named_with_its_field(run_file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(run_file, [override])
