"""Builds a folder as `kubectl kustomize` does, as far as deploy/kubernetes needs it.

If kubectl is installed, tests/deploy/kubernetes/test_kubernetes.py compares the two.
"""

from pathlib import Path
from typing import Any

import yaml

KNOWN = {"apiVersion", "kind", "namespace", "resources", "labels", "images", "patches"}
KNOWN |= {"configMapGenerator", "generatorOptions"}
_KEYS = dict.fromkeys(("containers", "initContainers", "volumes", "env"), "name") | {"volumeMounts": "mountPath"}
"""The field that identifies the items of a list."""


def load(folder: Path) -> list[dict[str, Any]]:
    """Returns the objects of a kustomization with its patches applied."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert kustomization.keys() <= KNOWN, kustomization.keys() - KNOWN
    objects: list[dict[str, Any]] = []
    for resource in kustomization.get("resources", []):
        path = folder / resource
        objects += load(path.resolve()) if path.is_dir() else documents(path)
    for patch in kustomization.get("patches", []):
        for change in documents(folder / patch["path"]):
            index = next(n for n, each in enumerate(objects) if identity(each) == identity(change))
            objects[index] = _merged(objects[index], change)
    for generated in kustomization.get("configMapGenerator", []):
        data = {name: (folder / name).read_text() for name in generated["files"]}
        metadata = {"name": generated["name"]}
        if labels := kustomization.get("generatorOptions", {}).get("labels"):
            metadata["labels"] = dict(labels)
        made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
        if generated.get("behavior") == "replace":
            objects = [each for each in objects if identity(each) != identity(made)]
        objects.append(made)
    if "namespace" in kustomization:
        for each in objects:
            each["metadata"]["namespace"] = kustomization["namespace"]
    images = {image["name"]: f"{image['newName']}:{image['newTag']}" for image in kustomization.get("images", [])}
    for each in objects:
        for container in containers(each):
            container["image"] = images.get(container["image"], container["image"])
    return objects


def documents(file: Path) -> list[dict[str, Any]]:
    """Returns the documents of a YAML file."""
    return [document for document in yaml.safe_load_all(file.read_text()) if document is not None]


def identity(each: dict[str, Any]) -> tuple[str, str]:
    """Returns the kind and the name of an object."""
    return each["kind"], each["metadata"]["name"]


def containers(each: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the containers of an object's pods, including init containers."""
    pod = each.get("spec", {}).get("template", {}).get("spec", {}) if isinstance(each.get("spec"), dict) else {}
    return [*pod.get("initContainers", []), *pod.get("containers", [])]


def _merged(before: Any, change: Any, key: str = "") -> Any:
    if isinstance(before, dict) and isinstance(change, dict):
        merged = before | {name: _merged(before.get(name), value, name) for name, value in change.items()}
        return {name: value for name, value in merged.items() if value is not None}
    if key in _KEYS and isinstance(before, list):
        own = _KEYS[key]
        by_name = {each[own]: each for each in before}
        changed = {each[own]: _merged(by_name.get(each[own]), each) for each in change}
        return list((changed | {name: each for name, each in by_name.items() if name not in changed}).values())
    return change
