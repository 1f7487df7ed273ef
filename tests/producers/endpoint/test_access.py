"""Access to the endpoint, with and without a key."""

from pathlib import Path

import pytest

from penstock.producers.endpoint.access import api_key, check_access
from penstock.producers.endpoint.chat.errors import ApiError
from penstock.schemas.config import ConfigError, EndpointConfig

OPEN = EndpointConfig(host="0.0.0.0")


def test_this_machine_alone_needs_no_key() -> None:
    check_access({}, None)
    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        assert api_key(EndpointConfig(host=host), {}) is None, host
    for host in ("0.0.0.0", "::", "10.0.0.7", "producer.example"):
        with pytest.raises(ConfigError, match=rf"endpoint.host = {host!r}.*PENSTOCK_API_KEY"):
            api_key(EndpointConfig(host=host), {})


def test_the_key_comes_from_the_environment_or_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert api_key(OPEN, {"PENSTOCK_API_KEY": "direct", "PENSTOCK_API_KEY_FILE": str(file)}) == "direct"
    assert api_key(OPEN, {"PENSTOCK_API_KEY_FILE": str(file)}) == "from-file"
    file.write_text("")
    with pytest.raises(ConfigError, match="the file is empty"):
        api_key(OPEN, {"PENSTOCK_API_KEY_FILE": str(file)})
    with pytest.raises(ConfigError, match="cannot be read"):
        api_key(OPEN, {"PENSTOCK_API_KEY_FILE": str(tmp_path / "none")})


def test_a_key_that_no_header_can_carry_is_refused_unquoted() -> None:
    with pytest.raises(ConfigError) as caught:
        api_key(OPEN, {"PENSTOCK_API_KEY": "sec ret"})
    assert "sec" not in str(caught.value).replace("PENSTOCK_API_KEY", "")


def test_only_the_bearer_of_the_key_gets_in() -> None:
    for given in (None, "", "Bearer", "Bearer wrong", "Basic right", "right", "Bearer \udcff"):
        with pytest.raises(ApiError) as caught:
            check_access({} if given is None else {"Authorization": given}, "right")
        assert caught.value.status == 401 and "right" not in caught.value.message, given
    for given in ("", "wrong", "Bearer right"):
        with pytest.raises(ApiError):
            check_access({"x-api-key": given}, "right")
    check_access({"Authorization": "Bearer right"}, "right")
    check_access({"x-api-key": "right", "Authorization": "Bearer another's"}, "right")
    check_access({"Authorization": "bearer right", "Origin": "http://page.example"}, "right")


def test_a_web_page_gets_in_with_the_key_alone() -> None:
    """Any page that a browser on this machine shows may send requests here."""
    with pytest.raises(ApiError) as caught:
        check_access({"Origin": "http://page.example"}, None)
    assert (caught.value.status, caught.value.code) == (403, "origin_refused")
