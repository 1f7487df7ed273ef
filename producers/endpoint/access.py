"""Access to the endpoint: with a key, or without one from this machine only."""

import hmac
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

from penstock.producers.endpoint.chat.errors import ApiError
from penstock.schemas.config import ConfigError, EndpointConfig
from penstock.schemas.process.files import read_secret

KEY = "PENSTOCK_API_KEY"
KEY_FILE = "PENSTOCK_API_KEY_FILE"
API_KEY = "x-api-key"
"""The header in which Anthropic's clients send a key."""


def api_key(config: EndpointConfig, environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns the secret key that requests must carry; None if everyone on this machine may send them.

    Raises:
        ConfigError: the key or its file cannot be used, or there is none for an address that others can reach.
    """
    file = environment.get(KEY_FILE)
    key = environment.get(KEY) or (read_secret(Path(file), KEY_FILE, "key") if file else None)
    if key is None and not _is_loopback(config.host):
        raise ConfigError(
            f"endpoint.host = {config.host!r}: other machines can reach it; expected a key in the environment variable "
            f"{KEY} or in the file that {KEY_FILE} names, or host = '127.0.0.1'"
        )
    if key is not None and (not key.isascii() or not key.isprintable() or " " in key):
        raise ConfigError(f"{KEY} or the file that {KEY_FILE} names: expected printable ASCII without spaces")
    return key


def check_access(headers: Mapping[str, str], key: str | None) -> None:
    """Checks that a request may be answered.

    Raises:
        ApiError: 401 for a request without the key; if there is no key, 403 for a request from a web page, because any
            page could send it.
    """
    if key is None:
        if "Origin" in headers:
            raise ApiError(403, "requests of web pages are refused by a run without a key", code="origin_refused")
        return
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    given = [headers.get(API_KEY, ""), token if scheme.lower() == "bearer" else ""]  # a client may send both
    # A header may hold any byte.
    if not any(hmac.compare_digest(one.strip().encode(errors="surrogateescape"), key.encode()) for one in given):
        raise ApiError(
            401,
            f"expected the run's key in the header 'Authorization: Bearer KEY' or '{API_KEY}: KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
