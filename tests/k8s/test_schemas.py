"""Nothing in the manifests is unknown to Kubernetes or to KubeRay's RayService: both would drop it without a word."""

import copy
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import pytest

VERSIONS = ("1.33", "1.37")  # the oldest that has all of it in force, and the newest that the validator knows
CUSTOM = {"RayService", "PodMonitor", "PrometheusRule"}

POD_MONITOR = {
    "type": "object",
    "additionalProperties": False,
    "required": ["selector", "podMetricsEndpoints"],
    "properties": {
        "selector": {"type": "object"},
        "podMetricsEndpoints": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["port"],
                "properties": {
                    "port": {"type": "string"},
                    "interval": {"type": "string", "pattern": r"^\d+s$"},
                    "relabelings": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {
                                "sourceLabels": {"type": "array", "items": {"type": "string"}},
                                "targetLabel": {"type": "string"},
                            },
                        },
                    },
                },
            },
        },
    },
}
RULE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["alert", "expr", "for", "labels", "annotations"],
    "properties": {
        "alert": {"type": "string", "pattern": "^[A-Z][A-Za-z]+$"},
        "expr": {"type": "string"},
        "for": {"type": "string", "pattern": r"^\d+m$"},
        "labels": {
            "type": "object",
            "additionalProperties": False,
            "required": ["severity"],
            "properties": {"severity": {"enum": ["critical", "warning"]}},
        },
        "annotations": {"type": "object", "required": ["summary", "description"], "maxProperties": 2},
    },
}
PROMETHEUS_RULE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["groups"],
    "properties": {
        "groups": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name", "rules"],
                "properties": {"name": {"type": "string"}, "rules": {"type": "array", "minItems": 1, "items": RULE}},
            },
        }
    },
}


def strict(schema: Any, *, top: bool = True) -> Any:
    """An openAPIV3Schema as JSON Schema that refuses what Kubernetes would prune, and numbers beyond their type."""
    if isinstance(schema, list):
        return [strict(item, top=False) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes") and key != "description"}
    if "properties" in out:
        out["properties"] = {key: strict(value, top=False) for key, value in schema["properties"].items()}
    for key in ("items", "additionalProperties", "anyOf", "allOf", "oneOf", "not"):
        if key in out:
            out[key] = strict(out[key], top=False)
    if schema.get("format") == "int32":
        out |= {"minimum": max(out.get("minimum", -(2**31)), -(2**31)), "maximum": 2**31 - 1}
    keeps_all = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if schema.get("type") == "object" and not keeps_all:
        out["additionalProperties"] = False
    if top:
        out["properties"]["metadata"] = {"type": "object"}  # every object's own, checked below
    return out


def doubled_keys(schema: Any, value: Any, path: str = "") -> Iterator[str]:
    """Where two items of a list have the same key, which Kubernetes refuses for x-kubernetes-list-map-keys."""
    if isinstance(value, dict):
        for key, item in value.items():
            part = schema.get("properties", {}).get(key, {})
            yield from doubled_keys(part, item, f"{path}.{key}")
    elif isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys")
        if keys:
            defaults = schema["items"]["properties"]
            seen = [tuple(item.get(key, defaults[key].get("default")) for key in keys) for item in value]
            yield from (f"{path}: {key}" for key in seen if seen.count(key) > 1)
        for item in value:
            yield from doubled_keys(schema.get("items", {}), item, f"{path}[]")


@pytest.fixture(scope="session")
def ray_service_schema(crd: dict[str, Any]) -> dict[str, Any]:
    """The openAPIV3Schema of the version that the manifests use."""
    (schema,) = (version["schema"]["openAPIV3Schema"] for version in crd["spec"]["versions"] if version["name"] == "v1")
    found: dict[str, Any] = schema
    return found


def faults_of_ray_service(schema: dict[str, Any], document: Any) -> list[str]:
    """What the API server would refuse or drop of a RayService."""
    validator = jsonschema.Draft202012Validator(strict(schema))
    faults = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]
    return [*faults, *doubled_keys(schema, document)]


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(manifests: Any, version: str) -> None:
    """Each document of a built-in kind is valid, without one unknown field, in old and new versions."""
    checked = [document for document in manifests.documents if document["kind"] not in CUSTOM]
    assert len(checked) > 10
    for document in checked:
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field_of_the_ray_pods(manifests: Any, version: str) -> None:
    """The pod templates within the RayService are what Kubernetes will be asked to run."""
    for where, template in manifests.pod_templates():
        document = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": where}, "template": template}
        kubernetes_validate.validate(document, version, strict=True)


def test_kuberay_knows_every_field(manifests: Any, ray_service_schema: dict[str, Any]) -> None:
    """The RayService is valid against the operator's own definition, without one unknown field."""
    assert manifests.ray_service()["apiVersion"] == "ray.io/v1"
    assert faults_of_ray_service(ray_service_schema, manifests.ray_service()) == []


def test_monitoring_has_known_fields_alone(manifests: Any) -> None:
    """PodMonitor and PrometheusRule use the fields that are listed above, and no other."""
    for document in manifests.of("PodMonitor"):
        jsonschema.validate(document["spec"], POD_MONITOR)
    for document in manifests.of("PrometheusRule"):
        jsonschema.validate(document["spec"], PROMETHEUS_RULE)
    assert manifests.overlay == "cpu-dev" or manifests.of("PodMonitor", "PrometheusRule")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.rayClusterConfig.workerGroupSpecs.0.minReplica", 1),
        ("spec.rayClusterConfig.workerGroupSpecs.0.minReplicas", "1"),
        ("spec.rayClusterConfig.workerGroupSpecs.0.maxReplicas", 2**31),
        ("spec.rayClusterConfig.workerGroupSpecs.0.rayStartParams.num-cpus", 0),
        ("spec.rayClusterConfig.authOptions.mode", "password"),
        ("spec.rayClusterConfig.headGroupSpec.template.spec.securityContext.runAsNoRoot", True),
        ("spec.rayClusterConfig.headGroupSpec.template.metadata.label", {}),
        ("spec.rayClusterConfig.headGroupSpec.template.spec.containers.0.livenessProbe.httpGet.host_name", "x"),
        ("spec.upgradeStrategy.kind", "NewCluster"),
        ("spec.serveConfig", ""),
    ],
)
def test_the_check_of_ray_services_can_fail(
    manifests: Any, ray_service_schema: dict[str, Any], path: str, value: object
) -> None:
    """A misspelt key, a wrong type and a number out of range are found wherever they stand."""
    document = copy.deepcopy(manifests.ray_service())
    place: Any = document
    *parents, last = path.split(".")
    for key in parents:
        place = place[int(key)] if key.isdigit() else place[key]
    place[last] = value
    assert len(faults_of_ray_service(ray_service_schema, document)) == 1


def test_doubled_names_are_found(manifests: Any, ray_service_schema: dict[str, Any]) -> None:
    """Two volumes or ports of one name are a fault, as for the API server."""
    document = copy.deepcopy(manifests.ray_service())
    volumes = document["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["volumes"]
    volumes.append(copy.deepcopy(volumes[0]))
    assert len(faults_of_ray_service(ray_service_schema, document)) >= 1
