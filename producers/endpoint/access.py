"""Who may use the endpoint: nobody but this machine without a key, and whoever has the key with one."""

import hmac
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

from producers.endpoint.errors import ApiError
from schemas.config import ConfigError, EndpointConfig

KEY = "PENSTOCK_API_KEY"
KEY_FILE = "PENSTOCK_API_KEY_FILE"


def api_key(config: EndpointConfig, environment: Mapping[str, str] = os.environ) -> str | None:
    """The key that requests must carry, a secret; None where everybody on this machine may send them.

    Raises:
        ConfigError: a key file that cannot be used, or no key for an address that others can reach.
    """
    key = environment.get(KEY) or _read(environment.get(KEY_FILE))
    if key is None and not _is_loopback(config.host):
        raise ConfigError(
            f"endpoint.host = {config.host!r}: other machines can reach it; expected a key in the environment variable "
            f"{KEY} or in the file that {KEY_FILE} names, or host = '127.0.0.1'"
        )
    if key is not None and (not key.isascii() or not key.isprintable() or " " in key):
        raise ConfigError(f"{KEY} or the file that {KEY_FILE} names: expected printable ASCII without spaces")
    return key


def check_key(authorization: str | None, key: str | None) -> None:
    """Raises ApiError 401 unless the request's Authorization header carries the key."""
    if key is None:
        return
    scheme, _, given = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
        raise ApiError(
            401,
            "expected the run's key in the header 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _read(file: str | None) -> str | None:
    if not file:
        return None
    try:
        key = Path(file).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{KEY_FILE} = {file!r}: cannot be read: {reason}") from None
    if not key:
        raise ConfigError(f"{KEY_FILE} = {file!r}: the file is empty, expected a key")
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
