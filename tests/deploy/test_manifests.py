"""deploy/kubernetes: the built manifests are valid for the API and for `jaxllm serve`; mutated ones are refused."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxllm.commands.flags import read_config_file
from tests.deploy import checks, kustomize, schemas
from tests.support.paths import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
SETS = ("base", "gpu")
# Texts that may differ: names that nothing refers to, and values of the cluster.
FREE = re.compile(
    r"(Service|PodDisruptionBudget|NetworkPolicy|ScaledObject)/metadata/name|.*/containers/0/name|Service/spec/ports/./name"
    r"|.*/serverAddress|.*/namespaceSelector/matchLabels/.*|.*=Qwen/.*"
)
Place = tuple[Any, ...]


def places(node: Any, path: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield all values below a node, containers included."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield (*path, key), value
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def mutants(manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the manifest with one mistake each: a misspelt key, a value of another type, another text, the opposite."""
    for path, value in places(manifest):
        where = "/".join(map(str, (manifest["kind"], *path)))
        is_free = FREE.fullmatch(where) or FREE.fullmatch(f"{where}={value}")
        for what in ("key", "type", "value"):
            changed = copy.deepcopy(manifest)
            node: Any = changed
            for part in path[:-1]:
                node = node[part]
            if what == "key" and isinstance(node, dict):
                node[f"{path[-1]}x"] = node.pop(path[-1])
            elif what == "type":
                node[path[-1]] = [True] if not isinstance(value, list) else {"x": True}
            elif what == "value" and isinstance(value, str | bool):
                node[path[-1]] = not value if isinstance(value, bool) else f"{value}x"
            else:
                continue
            if what == "type" or not is_free:
                yield f"{what} of {where}", changed


@pytest.mark.parametrize("name", SETS)
def test_nothing_is_wrong(name: str) -> None:
    manifests = kustomize.build(FOLDER / name)
    assert [error for manifest in manifests for error in schemas.errors(manifest)] == []
    assert checks.problems(manifests) == []


@pytest.mark.parametrize("name", SETS)
def test_every_planted_mistake_is_found(name: str) -> None:
    manifests = kustomize.build(FOLDER / name)
    unseen, counts = [], []
    for place, manifest in enumerate(manifests):
        made = list(mutants(manifest))
        counts.append(len(made))
        for what, changed in made:
            if not schemas.errors(changed) and not checks.problems(
                [*manifests[:place], changed, *manifests[place + 1 :]]
            ):
                unseen.append(what)
    assert unseen == [] and min(counts) >= 10


CONTAINER = "spec/template/spec/containers/0"


@pytest.mark.parametrize(
    ("kind", "path", "number"),
    [
        ("Deployment", "spec/replicas", 2),
        ("Deployment", "spec/template/spec/terminationGracePeriodSeconds", 135),
        ("Deployment", "spec/template/spec/securityContext/runAsUser", 0),
        ("Deployment", "spec/template/spec/securityContext/fsGroup", 0),
        ("Deployment", "spec/template/spec/securityContext/fsGroupChangePolicy", "Always"),
        ("Deployment", f"{CONTAINER}/args/7", "--drain-delay=0"),
        ("Deployment", f"{CONTAINER}/args/8", "--shutdown-timeout=600"),
        ("Deployment", f"{CONTAINER}/args/6", "--tensor-parallel-size=2"),
        ("Deployment", f"{CONTAINER}/args/4", "--max-num-seqs=32"),
        ("Deployment", f"{CONTAINER}/ports/1/containerPort", 50052),
        ("Deployment", f"{CONTAINER}/livenessProbe/grpc/port", 8000),
        ("Deployment", f"{CONTAINER}/resources/limits/memory", "64Gi"),
        ("ScaledObject", "spec/minReplicaCount", 0),
        ("ScaledObject", "spec/maxReplicaCount", 3),
        ("ScaledObject", "spec/triggers/0/metadata/threshold", "65"),
        ("ScaledObject", "spec/triggers/1/metadata/threshold", "80"),
    ],
)
def test_a_wrong_number_is_found(kind: str, path: str, number: Any) -> None:
    manifests = kustomize.build(FOLDER / "gpu")
    node: Any = next(manifest for manifest in manifests if manifest["kind"] == kind)
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("/"))
    for part in parents:
        node = node[part]
    node[last] = number
    assert all(schemas.errors(manifest) == [] for manifest in manifests)
    assert checks.problems(manifests)


@pytest.mark.parametrize("argument", ["--compilation-cache-bytes=2G", "--max-model-len=64"])
def test_programs_that_fill_their_volume_are_found(argument: str) -> None:
    manifests = kustomize.build(FOLDER / "base")
    (deployment,) = (manifest for manifest in manifests if manifest["kind"] == "Deployment")
    arguments = checks.container_of(deployment)["args"]
    arguments[arguments.index("--compilation-cache-bytes=1G")] = argument
    assert checks.problems(manifests) == ["compiled programs fill the volume of the cache"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, which has kustomize in it")
@pytest.mark.parametrize("name", SETS)
def test_kustomize_builds_the_same(name: str) -> None:
    built = subprocess.run(["kubectl", "kustomize", FOLDER / name], capture_output=True, text=True, check=True).stdout

    def by_name(manifest: dict[str, Any]) -> tuple[str, str]:
        return manifest["kind"], manifest["metadata"]["name"]

    assert sorted(kustomize.build(FOLDER / name), key=by_name) == sorted(yaml.safe_load_all(built), key=by_name)


def test_the_secret_is_a_file_of_flags(tmp_path: Path) -> None:
    """`--config` reads the file from the component's comment, which sets the API key and the admin key."""
    (written,) = re.findall(r"printf '(.+)' > keys.yaml", checks.KEYS)
    file = tmp_path / "keys.yaml"
    file.write_text(written.replace("\\n", "\n"))
    server, _ = checks.served(("serve", *read_config_file(str(file), ())))
    assert (server.api_key, server.admin_api_key) == (("KEY",), ("OTHER",))
