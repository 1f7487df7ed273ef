"""Finds a run's Redis: by the environment, the run file, or a small file that the launcher writes."""

import json
import os
import ssl
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, quote, urlsplit

from penstock.schemas.config import ConfigError, RunConfig
from penstock.schemas.process.files import read_secret

URL = "REDIS_URL"
PASSWORD_FILE = "REDIS_PASSWORD_FILE"
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1", "localhost.localdomain")
_CERTIFICATES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")


def connection_file(run_folder: Path) -> Path:
    """Returns the path of the file that the launcher of an embedded server writes, mode 0600: `{"url": ...}`."""
    return run_folder / "redis" / "connection.json"


def redis_url(config: RunConfig, runs: Path) -> str:
    """Returns REDIS_URL, else the run file's `redis.url`, else the URL of the run's own server.

    Raises:
        ConfigError: none of them is set, or see `configured_url`.
    """
    url = configured_url(config)
    if url:
        return url
    file = connection_file(config.folder(runs))
    try:
        return str(json.loads(file.read_text("utf-8"))["url"])
    except FileNotFoundError:
        raise ConfigError(
            f"no Redis: REDIS_URL and redis.url are not set and {file} does not exist; "
            "start the run with `penstock run`, or set REDIS_URL"
        ) from None


def configured_url(config: RunConfig | None) -> str | None:
    """Returns the URL that the user has configured: REDIS_URL, else the run file's `redis.url`, else None.

    Raises:
        ConfigError: see `with_password`.
    """
    name, url = URL, os.environ.get(URL)
    if not url and config is not None:
        name, url = "redis.url", config.redis.url
    return with_password(url, name) if url else None


def with_password(url: str, name: str) -> str:
    """Checks the URL, and adds the password from the file that REDIS_PASSWORD_FILE names if it has none. The result is
    a secret.

    name: the setting that holds the URL.

    Raises:
        ConfigError: not a Redis URL, an option that Penstock sets itself, or a file that cannot be read. The message
            quotes neither URL nor password.
    """
    parts = _split(url, name)
    file = os.environ.get(PASSWORD_FILE)
    if not file or parts.password:
        return url
    password = read_secret(Path(file), PASSWORD_FILE, "password")
    userinfo = f"{parts.username or ''}:{quote(password, safe='')}"
    return parts._replace(netloc=f"{userinfo}@{parts.netloc.rpartition('@')[2]}").geturl()


def place_of(url: str) -> str:
    """Returns the address in a Redis URL, without user and password, for messages."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or parts.path


def server_of(url: str) -> str:
    """Returns the server and database of a Redis URL in one spelling, without user, password and options: equal URLs
    differ in names of this machine, defaults and slashes."""
    parts = urlsplit(url)
    database = dict(parse_qsl(parts.query)).get("db", "")
    if parts.scheme == "unix":
        return f"unix://{Path(parts.path).resolve()}?db={int(database or 0)}"
    host = "localhost" if parts.hostname in _THIS_MACHINE else parts.hostname
    return f"{host}:{parts.port or 6379}/{int(database or parts.path.strip('/') or 0)}"


def certificate_problem(error: BaseException, url: str) -> str | None:
    """Describes the problem with the server's certificate, and what was expected; returns None for any other error.

    It is not an outage: waiting changes neither certificate nor URL. redis-py wraps it in a ConnectionError.
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, ssl.SSLCertVerificationError):
        found = found.__cause__ or found.__context__
    if found is None:
        return None
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    authorities = [f"{name} = {options[name]!r}" for name in ("ssl_ca_certs", "ssl_ca_path") if name in options]
    signed_by = f"an authority of {' or '.join(authorities)}" if authorities else "an authority this machine trusts"
    return (
        f"Redis at {place_of(url)} shows a certificate that cannot be verified "
        f"({found.verify_message.rstrip('.')}); expected one for the host name {parts.hostname!r}, signed by "
        f"{signed_by}{'' if authorities else ' (ssl_ca_certs in the URL names another)'}"
    )


def _split(url: str, name: str) -> SplitResult:
    expected = (
        f"{name} is no Redis URL; expected redis://[user[:password]@]host[:port][/database], rediss://... for TLS, or "
        "unix://[user[:password]@]/path, with special characters of the password percent-encoded"
    )
    try:
        parts = urlsplit(url)
        is_place = bool(parts.path) and not parts.hostname if parts.scheme == "unix" else bool(parts.hostname)
        is_database = parts.scheme == "unix" or parts.path.strip("/").isdigit() or parts.path in ("", "/")
        if parts.scheme not in ("redis", "rediss", "unix") or not is_place or not is_database or parts.fragment:
            raise ValueError
        _ = parts.port
    except ValueError:  # its own message may quote a part of the password
        raise ConfigError(expected) from None
    for option, value in parse_qsl(parts.query, keep_blank_values=True):
        # In redis-py a URL overrides arguments: timeouts below a blocking read, its own retries, another protocol.
        if not option.isidentifier():  # most likely a password with an unescaped question mark
            raise ConfigError(expected)
        if option != "db" and not option.startswith("ssl_"):
            raise ConfigError(f"{name}: option {option!r}, expected only db and those of TLS (ssl_ca_certs, ...)")
        if option in _CERTIFICATES and not os.access(value, os.R_OK):
            raise ConfigError(f"{name}: {option} = {value!r}: no such file, or not readable")
    return parts
