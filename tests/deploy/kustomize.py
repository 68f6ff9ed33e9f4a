"""The part of kustomize that `deploy/kubernetes` uses: resources, components, images and JSON patches (RFC 6902).

With it the manifests can be checked without kubectl; a test compares the two where kubectl is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
KINDS = {"Kustomization", "Component"}
KEYS = {"apiVersion", "kind", "resources", "components", "images", "patches"}


def build(folder: Path, below: tuple[Manifest, ...] = ()) -> tuple[Manifest, ...]:
    """Return the manifests of a folder; a component changes those `below` it and adds to them."""
    written = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if written["kind"] not in KINDS or written.keys() - KEYS:
        raise ValueError(f"{folder}: {written['kind']} with {sorted(written.keys() - KEYS)}")
    manifests = list(below)
    for name in written.get("resources", ()):
        path = folder / name
        manifests += build(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for name in written.get("components", ()):
        manifests = list(build(folder / name, tuple(manifests)))
    for patch in written.get("patches", ()):
        targets = [each for each in manifests if _is_target(patch["target"], each)]
        if not targets:
            raise ValueError(f"{folder}: nothing is {patch['target']}")
        for target in targets:
            for operation in yaml.safe_load(patch["patch"]):
                _apply(target, **operation)
    for image in written.get("images", ()):
        for manifest in manifests:
            for container in containers(manifest):
                if container["image"].partition(":")[0] == image["name"]:
                    container["image"] = f"{image['newName']}:{image['newTag']}"
    return tuple(manifests)


def containers(manifest: Manifest) -> list[dict[str, Any]]:
    """Return the containers of a Deployment; [] for other manifests."""
    return manifest["spec"]["template"]["spec"]["containers"] if manifest["kind"] == "Deployment" else []


def _is_target(target: dict[str, str], manifest: Manifest) -> bool:
    return (target["kind"], target["name"]) == (manifest["kind"], manifest["metadata"]["name"])


def _apply(node: Any, op: str, path: str, value: Any = None) -> None:
    *parents, last = (part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:])
    for part in parents:
        node = node[int(part) if isinstance(node, list) else part]
    if isinstance(node, list) and op == "add":
        node.insert(len(node) if last == "-" else int(last), value)
        return
    key: Any = int(last) if isinstance(node, list) else last
    if op != "add":
        del node[key]  # a missing key is an error, as in kustomize
    if op == "replace" and isinstance(node, list):
        node.insert(key, value)
    elif op != "remove":
        node[key] = value
