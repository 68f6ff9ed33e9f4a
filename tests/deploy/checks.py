"""Check manifests beyond their schemas: every name that refers to something must exist.

`problems` reads a whole set, in the form that kustomize builds, and compares it with the flags of `jaxllm serve`, its
metrics, the services in its health checks, and the Dockerfile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from jaxllm.commands import cli
from jaxllm.commands.arguments import UsageError, build, engine_config
from jaxllm.config import EngineConfig
from jaxllm_server import launch
from jaxllm_server.grpc.health import CONTROL, INFERENCE
from jaxllm_server.observability import prometheus
from jaxllm_server.shared.options import ServerOptions
from tests.deploy.kustomize import Manifest, containers
from tests.support.paths import ROOT

NAME = {"app.kubernetes.io/name": "jaxllm"}  # label of every manifest and pod
GPU = "nvidia.com/gpu"
# After the drain: gRPC's and HTTP's time for last answers, two more seconds for HTTP, and the engine's last step.
CLOSING = 2 * launch.FAREWELL_SECONDS + 2.0 + launch.CLOSE_SECONDS
QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
METRIC = re.compile(r"(jaxllm:\w+)(?:\{([^}]*)\})?")
METRICS = {
    *(f"jaxllm:{name}" for name, *_ in prometheus.GAUGES),
    *(f"jaxllm:{name}_total" for name, *_ in prometheus.COUNTERS),
    *(f"jaxllm:{name}_{part}" for name, *_ in prometheus.HISTOGRAMS for part in ("bucket", "sum", "count")),
}
APP_PROTOCOLS = {"http": "http", "grpc": "kubernetes.io/h2c"}
# Fields with few allowed values, at any depth: the API validates them, its schemas do not.
WORDS = {
    "whenUnsatisfiable": {"DoNotSchedule", "ScheduleAnyway"},
    "clusterIP": {"None"},
    "unhealthyPodEvictionPolicy": {"IfHealthyBudget", "AlwaysAllow"},
    "operator": {"Exists", "Equal"},
    "effect": {"NoSchedule", "PreferNoSchedule", "NoExecute"},
    "accessModes": {"ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"},
    "policyTypes": {"Ingress", "Egress"},
    "protocol": {"TCP", "UDP"},
    "topologyKey": {"kubernetes.io/hostname", "topology.kubernetes.io/zone"},
}
KEYS = (ROOT / "deploy" / "kubernetes" / "components" / "keys" / "kustomization.yaml").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def problems(manifests: Sequence[Manifest]) -> list[str]:
    """List the problems of a set of manifests that is valid by the schemas."""
    try:
        return list(_problems(manifests))
    except KeyError as missing:  # optional in the API, required here
        return [f"there is no {missing}"]


def _problems(manifests: Sequence[Manifest]) -> Iterator[str]:
    for manifest in manifests:
        if manifest["metadata"].get("labels") != NAME:
            yield f"{manifest['kind']} has not the labels {NAME}"
        yield from _unknown_words(manifest)
    kinds = [manifest["kind"] for manifest in manifests]
    if kinds.count("Deployment") != 1 or not {"Service", "PodDisruptionBudget", "NetworkPolicy"}.issubset(kinds):
        yield f"{kinds} are not all that is needed"
        return
    deployment = manifests[kinds.index("Deployment")]
    try:
        server, engine = served(tuple(container_of(deployment)["args"]))
    except UsageError as error:
        yield str(error)
        return
    yield from _of_deployment(deployment, server, engine)
    ports = {port["name"] for port in container_of(deployment)["ports"]}
    for manifest in manifests:
        spec = manifest["spec"]
        match manifest["kind"]:
            case "Service":
                labels = spec["selector"]
                yield from _of_service(spec, ports)
            case "PodDisruptionBudget":
                labels = spec["selector"]["matchLabels"]
            case "NetworkPolicy":
                labels = spec["podSelector"]["matchLabels"]
                yield from _of_network(spec, ports)
            case "ScaledObject":
                yield from _of_scaling(spec, deployment, server, engine)
                continue
            case _:
                continue
        if not selects(labels, deployment):
            yield f"{manifest['kind']} selects {labels}, which the pods have not"


def _unknown_words(node: Any) -> Iterator[str]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        words = value if isinstance(value, list) else [value]
        if key in WORDS and not WORDS[key].issuperset(words):
            yield f"{key} cannot be {value}"
        if isinstance(value, dict | list):
            yield from _unknown_words(value)


def container_of(deployment: Manifest) -> dict[str, Any]:
    """Return the only container of a Deployment."""
    (container,) = containers(deployment)
    return container


def selects(labels: Mapping[str, str], deployment: Manifest) -> bool:
    """Return whether the labels, at least one, are all among those of the pods."""
    return bool(labels) and labels.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


@cache
def served(arguments: tuple[str, ...]) -> tuple[ServerOptions, EngineConfig]:
    """Parse the container's arguments like `jaxllm`, but read no file of flags; raises UsageError."""
    options = cli.parse([each for each in arguments if not each.startswith("--config=")])
    if options["command"] != "serve":
        raise UsageError(f"the command is {options['command']}")
    listed = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return build(ServerOptions, listed), engine_config({**options, "model": options["model_tag"]})


def _of_deployment(deployment: Manifest, server: ServerOptions, engine: EngineConfig) -> Iterator[str]:
    spec, pod, container = deployment["spec"], deployment["spec"]["template"]["spec"], container_of(deployment)
    if not selects(spec["selector"]["matchLabels"], deployment):
        yield "the selector is not the pods' label"
    for spread in pod["topologySpreadConstraints"]:
        if not selects(spread["labelSelector"]["matchLabels"], deployment):
            yield "the spread is not over these pods"
    if pod["terminationGracePeriodSeconds"] < server.drain_delay + server.shutdown_timeout + CLOSING:
        yield "the grace period ends before the drain does"
    if server.drain_delay < 5.0:
        yield "requests are refused before the endpoints are taken out"
    if server.host not in ("0.0.0.0", "::"):
        yield "no client can reach the server"
    if server.served_model_name != (deployment["metadata"]["name"],):
        yield "the model has another name than its Deployment"
    opened = {"http": server.port, "grpc": server.grpc_port}
    if {port["name"]: port["containerPort"] for port in container["ports"]} != opened:
        yield f"the server's ports are {opened}"
    for probe, services in (("startup", ("", INFERENCE)), ("readiness", ("", INFERENCE)), ("liveness", (CONTROL,))):
        grpc = container[f"{probe}Probe"]["grpc"]
        if grpc["port"] != server.grpc_port or grpc.get("service", "") not in services:
            yield f"the {probe} probe asks for {grpc}"
    scraped = deployment["spec"]["template"]["metadata"]["annotations"]
    expected = {"scrape": "true", "path": "/metrics", "port": str(server.port)}
    if scraped != {f"prometheus.io/{name}": value for name, value in expected.items()}:
        yield f"Prometheus is not told of {expected}"
    yield from isolation_problems(pod, container)
    yield from _of_resources(container["resources"], pod, engine)


def isolation_problems(pod: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[str]:
    """Check that the pod runs without root, writes only into volumes, and cannot access the cluster."""
    (user,) = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    context = pod["securityContext"]
    if (str(context["runAsUser"]), str(context["runAsGroup"])) != user or context["fsGroup"] != context["runAsGroup"]:
        yield f"the image's user is {user}"
    if context.get("fsGroupChangePolicy") != "OnRootMismatch":
        yield "each pod lets the group write what is kept, and no pod reads that then"
    if not context["runAsNonRoot"] or context["seccompProfile"] != {"type": "RuntimeDefault"}:
        yield "the pod may be root"
    own = container["securityContext"]
    if own["allowPrivilegeEscalation"] or not own["readOnlyRootFilesystem"] or own["capabilities"] != {"drop": ["ALL"]}:
        yield "the container may more than it needs"
    if pod["automountServiceAccountToken"] or pod["enableServiceLinks"]:
        yield "the container is told of the cluster"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    if mounts.keys() != {volume["name"] for volume in pod["volumes"]}:
        yield "volumes and their mounts are not the same"
    if any(mount["name"] == "keys" and not mount["readOnly"] for mount in container["volumeMounts"]):
        yield "keys can be written"
    written = {"/tmp", *re.findall(r"(?:HOME|_DIR)=(/\S+)", DOCKERFILE)}
    config = [each.partition("=")[2] for each in container["args"] if each.startswith("--config=")]
    for path in sorted(written) + config:
        if not any(f"{path}/".startswith(f"{mount}/") for mount in mounts.values()):
            yield f"{path} is in no volume"
    secrets = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
    for name, path in zip(secrets, config, strict=True):
        if f"secret generic {name} --from-file={path.rpartition('/')[2]}\n" not in KEYS:
            yield f"{path} is read, and no volume makes it of the secret {name}"
    stages = re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE)
    if container["image"].rpartition("/")[2] not in {f"jaxllm:{stage}" for stage in stages}:
        yield f"no stage of the Dockerfile makes {container['image']}"


def _of_resources(resources: Mapping[str, Any], pod: Mapping[str, Any], engine: EngineConfig) -> Iterator[str]:
    sizes = [*resources["requests"].values(), *resources["limits"].values()]
    for volume in pod["volumes"]:
        sizes += [volume["emptyDir"]["sizeLimit"]] if "emptyDir" in volume else []
        if "ephemeral" in volume:
            claim = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
            sizes.append(claim["resources"]["requests"].get("storage"))
    if bad := [size for size in sizes if QUANTITY.fullmatch(str(size)) is None]:
        yield f"{bad} are no quantities"
    for volume in pod["volumes"]:
        limit = re.fullmatch(r"(\d+)Gi", str(volume.get("emptyDir", {}).get("sizeLimit", "")))
        most = 4 << 30 if engine.compilation_cache_bytes is None else engine.compilation_cache_bytes
        if volume["name"] == "cache" and limit is not None and 2 * most > int(limit[1]) << 30:
            yield "compiled programs fill the volume of the cache"
    if resources["requests"].get("memory") != resources["limits"].get("memory") or "cpu" not in resources["requests"]:
        yield "memory is not requested as it is limited"
    gpus = resources["limits"].get(GPU)
    if set(resources["limits"]) - {"memory", GPU} or set(resources["requests"]) - {"memory", "cpu"}:
        yield "resources are limited that nodes do not have"
    needed = engine.tensor_parallel_size * engine.data_parallel_size
    if gpus not in (None, str(needed)):
        yield f"{gpus} GPUs, and the engines take {needed}"
    if gpus is None and engine.kv_cache_memory_bytes is None:
        yield "the cache takes what the node has, not what the container has"
    if gpus is not None and not any(each.get("key") == GPU for each in pod.get("tolerations", ())):
        yield "nodes with GPUs do not let it in"


def _of_service(spec: Mapping[str, Any], ports: set[str]) -> Iterator[str]:
    for port in spec["ports"]:
        if port["targetPort"] not in ports or port["appProtocol"] != APP_PROTOCOLS[port["targetPort"]]:
            yield f"no port of the pods is {port}"


def _of_network(spec: Mapping[str, Any], ports: set[str]) -> Iterator[str]:
    if len(set(spec["policyTypes"])) != 2:
        yield "one direction is open"
    for rule in spec["ingress"]:
        if unknown := {port["port"] for port in rule["ports"]} - ports:
            yield f"no port of the pods is {unknown}"
    for rule in spec["egress"]:
        if not all(isinstance(port["port"], int) and "protocol" in port for port in rule["ports"]):
            yield "ports of others are numbers, and have protocols"


def _of_scaling(
    spec: Mapping[str, Any], deployment: Manifest, server: ServerOptions, engine: EngineConfig
) -> Iterator[str]:
    if spec["scaleTargetRef"]["name"] != deployment["metadata"]["name"]:
        yield f"there is no Deployment {spec['scaleTargetRef']['name']}"
    if "replicas" in deployment["spec"]:
        yield "the Deployment has a number of replicas as well"
    if not 1 <= spec["minReplicaCount"] <= spec["fallback"]["replicas"] <= spec["maxReplicaCount"]:
        yield "the numbers of replicas are not in order"
    for direction in spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"].values():
        if not {policy["type"] for policy in direction["policies"]} <= {"Pods", "Percent"}:
            yield f"no policy is one of {direction['policies']}"
    for trigger in spec["triggers"]:
        query, threshold = trigger["metadata"]["query"], float(trigger["metadata"]["threshold"])
        if trigger.get("metricType") != "AverageValue":
            yield "a sum over pods is not divided by their number"
        found = METRIC.findall(query)
        for name, labels in found:
            if name not in METRICS:
                yield f"there is no metric {name}"
            if labels != f'model_name="{server.served_model_name[0]}"':
                yield f"no series has the labels {labels}"
        if query != " + ".join(f"sum({name}{{{labels}}})" for name, labels in found):
            yield f"{query} is no sum over pods"
        if not 0 < threshold <= (1 if "_perc" in query else engine.max_num_seqs or 0):
            yield f"a pod never has {threshold} of {query}"
