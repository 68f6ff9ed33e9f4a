"""Schemas of the manifests: those of Kubernetes' API from the package kubernetes-validate, and one for KEDA.

Strict: a field that the API does not have is an error, as it is for `kubectl apply`.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import jsonschema
import referencing

VERSIONS = ("1.27.0", "1.37.0")  # first with stable gRPC probes; newest in the package
_COUNT = {"type": "integer", "minimum": 0}


def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    properties = {**required, **optional}
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


# The fields of KEDA 2 that the manifest uses, from config/crd/bases/keda.sh_scaledobjects.yaml and the page of its
# Prometheus scaler; kubernetes-validate has no CRD. The API's schema validates the HorizontalPodAutoscaler that KEDA
# derives.
_TEXT = {"type": "string"}
_NUMBER = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"}
_TRIGGER = _object(
    {
        "type": {"const": "prometheus"},
        "metadata": _object({"serverAddress": _TEXT | {"pattern": "^https?://"}, "query": _TEXT, "threshold": _NUMBER}),
    },
    metricType={"enum": ["AverageValue", "Value"]},
)
_SCALED_OBJECT = _object(
    {
        "apiVersion": {"const": "keda.sh/v1alpha1"},
        "kind": {"const": "ScaledObject"},
        "metadata": {"type": "object"},  # checked with the autoscaler
        "spec": _object(
            {
                "scaleTargetRef": _object({"name": _TEXT}),
                "triggers": {"type": "array", "items": _TRIGGER, "minItems": 1},
            },
            minReplicaCount=_COUNT,
            maxReplicaCount=_COUNT,
            pollingInterval=_COUNT,
            fallback=_object({"failureThreshold": _COUNT, "replicas": _COUNT}),
            advanced=_object({"horizontalPodAutoscalerConfig": _object({"behavior": {"type": "object"}})}),
        ),
    }
)


@cache
def _validator(version: str, kind: str, api: str) -> Any:
    if kind == "ScaledObject":
        return jsonschema.Draft202012Validator(_SCALED_OBJECT)
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}-local-strict"
    # The package names networking.k8s.io/v1 networking-v1.
    group, _, number = api.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.partition(".")[0], number)))
    schema = json.loads((folder / f"{name}.json").read_text())
    return jsonschema.Draft202012Validator(schema, registry=_definitions(version))


@cache
def _definitions(version: str) -> referencing.Registry:
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}-local-strict"
    definitions = json.loads((folder / "_definitions.json").read_text())
    return referencing.Resource.from_contents(definitions) @ referencing.Registry()


def errors(manifest: dict[str, Any]) -> list[str]:
    """Return the schema errors of a manifest, for the first version with errors."""
    kind, api = str(manifest.get("kind")), str(manifest.get("apiVersion"))
    for version in VERSIONS:
        try:
            validator = _validator(version, kind, api)
        except FileNotFoundError:
            return [f"Kubernetes {version} has no {kind} of {api}"]
        if found := [f"{version}: {error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]:
            return found
    return errors(autoscaler(manifest)) if kind == "ScaledObject" else []


def autoscaler(scaled: dict[str, Any]) -> dict[str, Any]:
    """Return the HorizontalPodAutoscaler that KEDA derives from a ScaledObject."""
    spec = scaled["spec"]
    metrics = [
        {
            "type": "External",
            "external": {
                "metric": {"name": f"s{place}-prometheus"},
                "target": {"type": trigger["metricType"], "averageValue": trigger["metadata"]["threshold"]},
            },
        }
        for place, trigger in enumerate(spec["triggers"])
    ]
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": scaled["metadata"],
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", **spec["scaleTargetRef"]},
            "minReplicas": spec["minReplicaCount"],
            "maxReplicas": spec["maxReplicaCount"],
            "behavior": spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
            "metrics": metrics,
        },
    }
