"""compose.yaml and the images: what can be told without a container engine. `make compose-check` brings them up."""

import json
import re
import shutil
import socket
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from deploy.compose_check.images import STAND_INS
from deploy.images.lock import BUILD, pins
from deploy.security.acl import user_name
from schemas.config import MetricsConfig
from schemas.endpoint import PASSWORD_FILE, URL, register_metrics_port, unregister_metrics_port

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
IMAGES = DEPLOY / "images"
TEXT = (DEPLOY / "compose.yaml").read_text()
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(TEXT)["services"]
PRIVATE = (
    "secrets/admin",
    "handout/trainer/password",
    "deploy/secrets/demo-trainer",
    "deploy/kubernetes/handout/redis/users.acl",
    "deploy/runs/demo/redis/connection.json",
    "deploy/runs/demo/run.toml",
)
"""What somebody may have put beside the sources: passwords, and folders of runs."""
SHIPPED = ("deploy/runs/demo.toml", "deploy/security/acl.py", "producers/__main__.py")
PROFILES = {"cpu": ("producer", "trainer"), "gpu": ("producer-gpu", "trainer-gpu")}


def resolved(value: str, **variables: str) -> str:
    """A value with its variables put in: `${NAME:-default}`, as compose does it."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: variables.get(match[1], match[2]), value)


def own() -> list[dict[str, Any]]:
    return [service for service in SERVICES.values() if "build" in service]


def test_the_demo_is_what_starts_without_a_word_and_gpus_are_a_profile() -> None:
    (line,) = [line for line in (DEPLOY / ".env").read_text().splitlines() if not line.startswith("#")]
    assert line == "COMPOSE_PROFILES=cpu"
    for profile, names in PROFILES.items():
        assert all(SERVICES[name]["profiles"] == [profile] for name in names)
    for name in ("setup", "redis", "redis-exporter", "prometheus", "grafana"):
        assert "profiles" not in SERVICES[name]


@pytest.mark.parametrize("profile", PROFILES)
def test_prometheus_finds_producers_and_trainer_of_either_profile_by_one_name(profile: str) -> None:
    scrapes = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    found = {
        name: each["port"] for scrape in scrapes for each in scrape.get("dns_sd_configs", []) for name in each["names"]
    }
    assert found == {"trainer": MetricsConfig().port, "producer": MetricsConfig().port, "redis-exporter": 9121}
    for name in PROFILES[profile]:
        networks = SERVICES[name].get("networks", {})
        assert name in found or set(networks["default"]["aliases"]) <= found.keys()
    assert all(name in SERVICES for name in found)


def test_replicas_share_no_name_no_port_and_no_id() -> None:
    for name in ("producer", "producer-gpu"):
        service = SERVICES[name]
        assert not {"container_name", "hostname", "ports"} & service.keys()
        assert "--id" not in service["command"]
    assert "--id" not in (IMAGES / "producer.sh").read_text()


def test_ports_are_open_to_this_machine_only() -> None:
    ports = [resolved(port) for service in SERVICES.values() for port in service.get("ports", [])]
    assert sorted(ports) == ["127.0.0.1:3000:3000", "127.0.0.1:9090:9090"]


def test_each_part_mounts_its_own_password_and_no_other() -> None:
    parts = {"producer": "producer", "producer-gpu": "producer", "trainer": "trainer", "trainer-gpu": "trainer"}
    for name, role in (parts | {"penstock": "observer", "redis-exporter": "observer"}).items():
        service = SERVICES[name]
        secrets = [volume for volume in service["volumes"] if "secret" in volume or "acl" in volume]
        assert secrets == [f"{role}-secret:/run/penstock:ro"]
        user = resolved(service["environment"].get(URL, service["environment"].get("REDIS_USER", "")))
        assert user_name("demo", role) in user
        assert service["environment"].get(PASSWORD_FILE, "").startswith("/run/penstock/")
    with_all = [
        name for name, service in SERVICES.items() if any(":/secrets" in each for each in service.get("volumes", []))
    ]
    assert with_all == ["setup"]


def test_no_password_stands_in_the_file_or_in_an_image() -> None:
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            assert "PASSWORD" not in name or name.endswith("_FILE"), name
            assert not re.search(r"//[^@/]*:[^@/]+@", resolved(str(value))), name
    for file in IMAGES.glob("*.Dockerfile"):
        assert not re.search(r"(?i)^\s*(ARG|ENV)\b.*(password|secret|token)", file.read_text(), re.MULTILINE), file


def test_redis_never_evicts_and_writes_a_file() -> None:
    command = resolved(SERVICES["redis"]["command"])
    for setting in ("--appendonly yes", "--maxmemory-policy noeviction", "--aclfile", "--proto-max-bulk-len 8mb"):
        assert setting in command
    assert "redis:/data" in SERVICES["redis"]["volumes"]


def test_what_fails_is_started_again_and_what_has_ended_well_is_not() -> None:
    for names in PROFILES.values():
        assert [SERVICES[name]["restart"] for name in names] == ["on-failure", "on-failure"]


def test_every_image_is_pinned() -> None:
    for name, service in SERVICES.items():
        tag = resolved(service["image"]).rpartition(":")[2]
        if "build" not in service and name != "penstock":
            assert re.search(r"\d+\.\d+\.\d+", tag), service["image"]
    for file in [*IMAGES.glob("*.Dockerfile"), DEPLOY / "compose_check" / "stand_in.Dockerfile"]:
        (image,) = re.findall(r"^FROM (\S+)", file.read_text(), re.MULTILINE)
        assert image == "base" or re.fullmatch(r"docker\.io/library/python:3\.11\.\d+-slim-bookworm", image)


def test_every_dockerfile_ends_as_a_user_without_rights_and_with_a_health_check() -> None:
    for file in IMAGES.glob("*.Dockerfile"):
        users = re.findall(r"^USER (\S+)", file.read_text(), re.MULTILINE)
        assert users[-1] == "penstock", file
        if file.name != "base.Dockerfile":
            assert re.search(r"^HEALTHCHECK", file.read_text(), re.MULTILINE), file
    for service in own():
        assert "user" not in service
        assert (ROOT / service["build"]["dockerfile"]).is_file()


def test_the_engine_is_installed_once_for_each_profile() -> None:
    with_engine = [file.name for file in IMAGES.glob("*.Dockerfile") if "requirements" in file.read_text()]
    assert with_engine == ["base.Dockerfile"]
    contexts = {
        name: service["build"].get("additional_contexts") for name, service in SERVICES.items() if "build" in service
    }
    for profile, suffix in (("cpu", ""), ("gpu", "-gpu")):
        for role in ("producer", "trainer", "prepare"):
            assert contexts[role + suffix] == {"base": f"service:base{suffix}"}
        assert SERVICES[f"base{suffix}"]["build"]["args"] == {"ENGINE": profile}


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_what_images_install_is_what_the_project_asks_for(extra: str) -> None:
    lines = (IMAGES / f"requirements-{extra}.txt").read_text().splitlines()
    versions = {Requirement(line).name: next(iter(Requirement(line).specifier)).version for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"][extra], *BUILD]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(versions[wanted.name].partition("+")[0]), text
    assert all(re.fullmatch(r"\S+==[\w.+]+( *;.*)?", line) for line in lines)


def test_a_lock_follows_what_packages_need_and_leaves_out_what_is_not_there() -> None:
    packages: dict[str, dict[str, Any]] = {
        "a": {"version": "1", "requires_dist": ["b>=1", 'c; extra == "more"', 'd; python_version < "3"', "absent"]},
        "b": {"version": "2", "requires_dist": ["A"]},
        "c": {"version": "3"},
        "d": {"version": "4"},
        "stray": {"version": "5"},
    }
    assert pins(["A"], packages) == ["a==1", "b==2"]
    assert pins(["a[more]"], packages) == ["a==1", "b==2", "c==3"]


def test_only_sources_go_into_an_image() -> None:
    first, *rest = (ROOT / ".dockerignore").read_text().splitlines()
    assert first == "*"
    kept = [line.removeprefix("!") for line in rest if line.startswith("!")]
    assert all(list(ROOT.glob(name)) for name in kept)
    assert not {"runs", "tests", ".git", ".venv"} & set(kept)


def test_passwords_and_runs_stay_out_of_an_image() -> None:
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    assert [file for file in PRIVATE if not is_ignored(file, patterns)] == []
    assert [file for file in SHIPPED if is_ignored(file, patterns)] == []


def is_ignored(file: str, patterns: list[str]) -> bool:
    """As a builder reads .dockerignore: the last pattern counts that takes the file or a folder above it."""
    parts = Path(file).parts
    above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    ignored = False
    for pattern in patterns:
        bare = pattern.removeprefix("!").rstrip("/")
        expression = re.escape(bare).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(expression, name) for name in above):
            ignored = not pattern.startswith("!")
    return ignored


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_passwords_and_runs_stay_out_of_git(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    checked = subprocess.run(
        ["git", "-C", tmp_path, "-c", "core.excludesFile=", "check-ignore", *PRIVATE, *SHIPPED],
        capture_output=True,
        text=True,
    )
    assert checked.stdout.splitlines() == list(PRIVATE)


def test_stand_ins_are_for_published_images_of_the_compose_file() -> None:
    for name in STAND_INS:
        assert "build" not in SERVICES[name]
    published = {name for name, service in SERVICES.items() if "build" not in service}
    assert published - STAND_INS.keys() == {"grafana", "penstock"}


def test_a_process_that_listens_everywhere_is_registered_under_its_host(tmp_path: Path) -> None:
    register_metrics_port(tmp_path, "trainer", "0.0.0.0", 9400)
    file = tmp_path / "metrics" / "trainer.json"
    assert json.loads(file.read_text())[0]["targets"] == [f"{socket.gethostname()}:9400"]
    unregister_metrics_port(tmp_path, "trainer", "0.0.0.0", 9400)
    assert not file.exists()
    register_metrics_port(tmp_path, "trainer", "10.0.0.7", 9400)
    assert json.loads(file.read_text())[0]["targets"] == ["10.0.0.7:9400"]
