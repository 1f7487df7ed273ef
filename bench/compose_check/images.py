"""The images of compose.yaml: the project's own are built, a published one that is missing gets a stand-in."""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from bench.compose_check.podman import COMPOSE_FILE, DEPLOY, Podman

STAND_IN = Path(__file__).with_name("stand_in.Dockerfile")


class StandIn(NamedTuple):
    """The Debian package that stands in for a published image, and the arguments of stand_in.Dockerfile."""

    package: str
    user_name: str
    folder: str
    program: str
    started_by: str


STAND_INS = {
    "redis": StandIn("redis-server", "redis", "/data", "setpriv --reuid=redis --regid=redis --clear-groups", "root"),
    "prometheus": StandIn("prometheus", "prometheus", "/prometheus", "prometheus", "prometheus"),
    "redis-exporter": StandIn(
        "prometheus-redis-exporter", "prometheus", "/srv", "prometheus-redis-exporter", "prometheus"
    ),
}
"""By service. Grafana has none: no distribution packages it."""


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE_FILE.read_text("utf-8"))["services"]
    return found


def build_all(podman: Podman) -> None:
    """Raises CommandError if a build fails."""
    specified = services()
    for name in ("setup", "base", "trainer", "producer"):
        build = specified[name]["build"]
        options = [f"--build-arg={key}={value}" for key, value in build.get("args", {}).items()]
        for context, place in build.get("additional_contexts", {}).items():
            options.append(f"--build-context={context}=docker://{specified[place.removeprefix('service:')]['image']}")
        podman.build(specified[name]["image"], DEPLOY.parent / build["dockerfile"], DEPLOY.parent, *options)
    for name, stand_in in STAND_INS.items():
        image = specified[name]["image"]
        if podman.has_image(image):
            continue
        options = [f"--build-arg={key.upper()}={value}" for key, value in stand_in._asdict().items()]
        podman.build(image, STAND_IN, STAND_IN.parent, *options)
