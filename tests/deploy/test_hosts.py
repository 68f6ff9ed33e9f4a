"""deploy/kubernetes/hosts: one model over several hosts, as LeaderWorkerSet starts it."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import pytest

from tests.deploy import checks, kustomize, schemas
from tests.deploy.test_manifests import FOLDER

HOSTS = FOLDER / "hosts"
# Fields of leaderworkerset.x-k8s.io/v1 that the manifest uses (api/leaderworkerset/v1); pods have the API's schema.
FIELDS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"replicas", "startupPolicy", "leaderWorkerTemplate"},
    "spec/leaderWorkerTemplate": {"size", "restartPolicy", "leaderTemplate", "workerTemplate"},
}


def problems(manifests: list[dict[str, Any]]) -> list[str]:
    found = [error for each in manifests if each["kind"] != "LeaderWorkerSet" for error in schemas.errors(each)]
    (group,) = (each for each in manifests if each["kind"] == "LeaderWorkerSet")
    for path, names in FIELDS.items():
        node: Any = group
        for part in filter(None, path.split("/")):
            node = node[part]
        found += [f"{path} has the fields {sorted(node)}"] * (node.keys() != names)
    template = group["spec"]["leaderWorkerTemplate"]
    if (group["apiVersion"], template["restartPolicy"], group["spec"]["startupPolicy"]) != (
        *("leaderworkerset.x-k8s.io/v1", "RecreateGroupOnPodRestart", "LeaderCreated"),
    ):
        found.append("a lost process does not start the group again")
    labels = [template[role]["metadata"]["labels"] for role in ("leaderTemplate", "workerTemplate")]
    for each in manifests:
        spec = each["spec"]
        if each["kind"] == "Service" and [spec["selector"].items() <= own.items() for own in labels] != [True, False]:
            found.append("the service does not select the leader alone")
        if each["kind"] == "NetworkPolicy":
            own = spec["podSelector"]["matchLabels"]
            if not all(own.items() <= each.items() for each in labels):
                found.append("the policy is not that of all hosts")
            if not any(
                "ports" not in rule and rule["from"] == [{"podSelector": {"matchLabels": own}}]
                for rule in spec["ingress"]
            ):
                found.append("the hosts do not reach each other")
    return found + [error for rank in range(template["size"]) for error in of_host(template, rank)]


def of_host(template: Mapping[str, Any], rank: int) -> list[str]:
    """List the problems of a host's pod, with the variables that LeaderWorkerSet sets."""
    pod = template["workerTemplate" if rank else "leaderTemplate"]
    found = schemas.errors(pod | {"apiVersion": "v1", "kind": "Pod"})
    (container,) = pod["spec"]["containers"]
    variables = {"LWS_GROUP_SIZE": template["size"], "LWS_WORKER_INDEX": rank, "LWS_LEADER_ADDRESS": "a-0.a.ns"}
    arguments = [re.sub(r"\$\((\w+)\)", lambda name: str(variables[name[1]]), each) for each in container["args"]]
    try:
        server, engine = checks.served(tuple(arguments))
    except checks.UsageError as error:
        return [*found, str(error)]
    if (server.num_hosts, server.host_rank, server.headless) != (template["size"], rank, rank > 0):
        found.append(f"host {rank} is not one of {template['size']}")
    if engine.tensor_parallel_size != template["size"] * int(container["resources"]["limits"][checks.GPU]):
        found.append("the GPUs of all hosts are not those of the model")
    if [each["name"] for each in container.get("env", ())] != ["JAXLLM_HOSTS_KEY"]:
        found.append("the hosts have no key")
    drain = server.drain_delay + server.shutdown_timeout + checks.CLOSING if not rank else 0
    if pod["spec"]["terminationGracePeriodSeconds"] < drain:
        found.append("the grace period ends before the drain does")
    opened = {each["name"]: each["containerPort"] for each in container.get("ports", ())}
    if opened != ({} if rank else {"http": server.port, "grpc": server.grpc_port}):
        found.append("the ports are not those of the server")
    return found + list(checks.isolation_problems(pod["spec"], container))


def test_nothing_is_wrong() -> None:
    assert problems(list(kustomize.build(HOSTS))) == []


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("spec/leaderWorkerTemplate/size", 3),
        ("spec/leaderWorkerTemplate/restartPolicy", "None"),
        ("spec/leaderWorkerTemplate/sizes", 2),
        ("spec/leaderWorkerTemplate/workerTemplate/spec/containers/0/args/5", "--uds=/tmp/x"),
        ("spec/leaderWorkerTemplate/workerTemplate/spec/containers/0/args/6", "--tensor-parallel-size=8"),
        ("spec/leaderWorkerTemplate/leaderTemplate/spec/containers/0/args/3", "--host-rank=1"),
        ("spec/leaderWorkerTemplate/leaderTemplate/spec/containers/0/args/2", "--num-host=2"),
        ("spec/leaderWorkerTemplate/leaderTemplate/spec/containers/0/env", []),
        ("spec/leaderWorkerTemplate/leaderTemplate/spec/terminationGracePeriodSeconds", 60),
        ("spec/leaderWorkerTemplate/leaderTemplate/spec/securityContext/runAsUser", 0),
        ("spec/leaderWorkerTemplate/leaderTemplate/spec/contaners", []),
        ("spec/leaderWorkerTemplate/leaderTemplate/metadata/labels/role", "follower"),
    ],
)
def test_a_planted_mistake_is_found(place: str, value: Any) -> None:
    manifests = copy.deepcopy(list(kustomize.build(HOSTS)))
    node: Any = next(each for each in manifests if each["kind"] == "LeaderWorkerSet")
    *parents, last = (int(part) if part.isdigit() else part for part in place.split("/"))
    for part in parents:
        node = node[part]
    node[last] = value
    assert problems(manifests)
