"""What KubeRay 1.7, its autoscaler and Kubernetes ask for beyond their schemas.

The sources are KubeRay's user guides (RayService, autoscaling, GCS fault tolerance, token authentication) and
Kubernetes' page on disruption budgets. Each rule is a function that names what breaks it, and each is seen to find a
mutation.
"""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Spec = dict[str, Any]
Rule = Callable[[Spec], Iterator[str]]

NAME_LENGTH = 47  # the operator adds a suffix to a RayService's name, and to that the names of Services
DNS_LABEL = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")


def cluster_of(service: Spec) -> Spec:
    cluster: Spec = service["spec"]["rayClusterConfig"]
    return cluster


def groups_of(service: Spec) -> list[Spec]:
    groups: list[Spec] = cluster_of(service)["workerGroupSpecs"]
    return groups


def templates_of(service: Spec) -> list[Spec]:
    return [cluster_of(service)["headGroupSpec"]["template"], *(group["template"] for group in groups_of(service))]


def names(service: Spec) -> Iterator[str]:
    """Names that fit with their suffixes, groups that can be told apart."""
    name = service["metadata"]["name"]
    if len(name) > NAME_LENGTH or not DNS_LABEL.match(name):
        yield f"name {name}"
    found = [group["groupName"] for group in groups_of(service)]
    yield from (f"group {group}" for group in found if not DNS_LABEL.match(group) or found.count(group) > 1)


def sizes(service: Spec) -> Iterator[str]:
    """0 <= minReplicas <= replicas <= maxReplicas, and room to scale."""
    for group in groups_of(service):
        if not 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            yield f"replicas of {group['groupName']}"
        if group["minReplicas"] == group["maxReplicas"]:
            yield f"{group['groupName']} is not autoscaled"


def head(service: Spec) -> Iterator[str]:
    """The head runs no replica, the operator reaches its dashboard, its container is the first, with known ports."""
    group = cluster_of(service)["headGroupSpec"]
    if group["rayStartParams"].get("dashboard-host") != "0.0.0.0":  # noqa: S104  what reaches it is the policies' part
        yield "dashboard-host"
    if group["rayStartParams"].get("num-cpus") != "0":
        yield "num-cpus of the head"
    if not service["spec"].get("excludeHeadPodFromServeSvc"):
        yield "head in the Service"
    ports = {port["name"]: port["containerPort"] for port in group["template"]["spec"]["containers"][0]["ports"]}
    wanted = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "serve": 8000, "metrics": 8080}
    if ports != wanted:
        yield f"ports of the head: {ports}"


def workers(service: Spec) -> Iterator[str]:
    """A proxy and metrics on each worker; CPUs and GPUs are taken from the limits, so nothing else may name them."""
    for group in groups_of(service):
        container = group["template"]["spec"]["containers"][0]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        if ports != {"serve": 8000, "metrics": 8080}:
            yield f"ports of {group['groupName']}"
        if {"num-cpus", "num-gpus", "resources", "labels"} & group.get("rayStartParams", {}).keys():
            yield f"resources of {group['groupName']} in rayStartParams"
        if not {"cpu", "memory"} <= container["resources"]["limits"].keys():
            yield f"limits of {group['groupName']}"


def autoscaler(service: Spec) -> Iterator[str]:
    """Version 2 owns the pods' lives: the kubelet may not restart a container in place."""
    cluster = cluster_of(service)
    if not cluster.get("enableInTreeAutoscaling") or cluster["autoscalerOptions"].get("version") != "v2":
        yield "autoscaler v2"
    for template in templates_of(service):
        if template["spec"].get("restartPolicy") != "Never":
            yield "restartPolicy"


def fault_tolerance(service: Spec) -> Iterator[str]:
    """Through gcsFaultToleranceOptions, and then not through the older annotations, parameters and variables too."""
    cluster = cluster_of(service)
    options = cluster.get("gcsFaultToleranceOptions")
    if not options or "redisAddress" not in options:
        yield "no gcsFaultToleranceOptions"
        return
    for key in ("redisPassword", "redisUsername"):
        if "secretKeyRef" not in options.get(key, {}).get("valueFrom", {}):
            yield f"{key} is not from a Secret"
    annotations = service["metadata"].get("annotations", {})
    yield from (f"annotation {key}" for key in annotations if key.startswith("ray.io/"))
    yield from (key for key in cluster["headGroupSpec"]["rayStartParams"] if key.startswith("redis-"))
    for template in templates_of(service):
        for variable in template["spec"]["containers"][0].get("env", []):
            if variable["name"] in {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"}:
                yield variable["name"]


def authentication(service: Spec) -> Iterator[str]:
    """Tokens need a stated Ray version of at least 2.52, and nobody else may set the mode."""
    cluster = cluster_of(service)
    if cluster.get("authOptions", {}).get("mode") != "token":
        yield "authOptions.mode"
    version = tuple(int(part) for part in str(cluster.get("rayVersion", "0")).split("."))
    if version < (2, 52):
        yield "rayVersion"
    for template in templates_of(service):
        for variable in template["spec"]["containers"][0].get("env", []):
            if variable["name"].startswith("RAY_AUTH"):
                yield variable["name"]


def upgrade(service: Spec) -> Iterator[str]:
    """Options go with the incremental strategy alone, and their steps must lead somewhere."""
    strategy = service["spec"]["upgradeStrategy"]
    options = strategy.get("clusterUpgradeOptions")
    if strategy["type"] not in {"NewCluster", "NewClusterWithIncrementalUpgrade", "None"}:
        yield f"type {strategy['type']}"
    if (options is not None) != (strategy["type"] == "NewClusterWithIncrementalUpgrade"):
        yield "clusterUpgradeOptions"
    if options:
        if not 0 < options["stepSizePercent"] <= options.get("maxSurgePercent", 100) <= 100:
            yield "steps"
        if options["intervalSeconds"] <= 0:
            yield "intervalSeconds"


def no_longer_read(service: Spec) -> Iterator[str]:
    """Fields that the operator accepts and ignores."""
    for key in ("serviceUnhealthySecondThreshold", "deploymentUnhealthySecondThreshold"):
        if key in service["spec"]:
            yield key


RULES: list[Rule] = [
    names,
    sizes,
    head,
    workers,
    autoscaler,
    fault_tolerance,
    authentication,
    upgrade,
    no_longer_read,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_operator_rules_hold(manifests: Any, rule: Rule) -> None:
    """No rule of the operator is broken."""
    assert list(rule(manifests.ray_service())) == []


G0, HEAD = "spec.rayClusterConfig.workerGroupSpecs.0", "spec.rayClusterConfig.headGroupSpec"
ENV = {"name": "RAY_REDIS_ADDRESS", "value": "redis://x"}


@pytest.mark.parametrize(
    ("rule", "path", "value"),
    [
        (names, "metadata.name", "a" * 48),
        (names, f"{G0}.groupName", "encoder"),
        (names, f"{G0}.groupName", "CPU"),
        (sizes, f"{G0}.minReplicas", 99),
        (sizes, f"{G0}.maxReplicas", 0),
        (head, f"{HEAD}.rayStartParams.num-cpus", "1"),
        (head, f"{HEAD}.template.spec.containers.0.ports.3.name", "http"),
        (head, "spec.excludeHeadPodFromServeSvc", False),
        (head, f"{HEAD}.rayStartParams.dashboard-host", "127.0.0.1"),
        (workers, f"{G0}.rayStartParams.num-cpus", "4"),
        (workers, f"{G0}.template.spec.containers.0.ports.0.containerPort", 8001),
        (autoscaler, "spec.rayClusterConfig.autoscalerOptions.version", "v1"),
        (autoscaler, f"{G0}.template.spec.restartPolicy", "Always"),
        (fault_tolerance, "metadata.annotations", {"ray.io/ft-enabled": "true"}),
        (fault_tolerance, f"{HEAD}.rayStartParams.redis-password", "$REDIS_PASSWORD"),
        (fault_tolerance, f"{HEAD}.template.spec.containers.0.env.0", ENV),
        (fault_tolerance, "spec.rayClusterConfig.gcsFaultToleranceOptions.redisPassword", {"value": "secret"}),
        (authentication, "spec.rayClusterConfig.rayVersion", "2.51.0"),
        (authentication, "spec.rayClusterConfig.authOptions.mode", "disabled"),
        (upgrade, "spec.upgradeStrategy.type", "Recreate"),
        (upgrade, "spec.upgradeStrategy", {"type": "NewClusterWithIncrementalUpgrade"}),
        (no_longer_read, "spec.serviceUnhealthySecondThreshold", 900),
    ],
)
def test_each_rule_can_be_broken(manifests: Any, rule: Rule, path: str, value: object) -> None:
    """Every rule finds what it is there to find."""
    service = copy.deepcopy(manifests.ray_service())
    place: Any = service
    *parents, last = path.split(".")
    for key in parents:
        place = place[int(key)] if key.isdigit() else place[key]
    place[int(last) if last.isdigit() else last] = value
    assert list(rule(service))


def test_the_ray_version_is_the_pinned_one(manifests: Any, pinned: dict[str, str]) -> None:
    """The operator is told the version that constraints.txt pins, which is what the image holds."""
    assert manifests.ray_cluster()["rayVersion"] == pinned["ray"]


def test_budgets_are_numbers(manifests: Any) -> None:
    """Each worker group of several pods keeps one, and never all of them.

    Of pods that no built-in controller owns, Kubernetes takes minAvailable as a number and nothing else.
    """
    fewest = {group["groupName"]: group["minReplicas"] for group in manifests.ray_cluster()["workerGroupSpecs"]}
    budgets = manifests.of("PodDisruptionBudget")
    for budget in budgets:
        spec = budget["spec"]
        assert spec.keys() == {"minAvailable", "selector", "unhealthyPodEvictionPolicy"}
        group = spec["selector"]["matchLabels"]["tokenalign.group"]
        assert isinstance(spec["minAvailable"], int)
        assert 0 < spec["minAvailable"] < fewest[group]
    assert {b["spec"]["selector"]["matchLabels"]["tokenalign.group"] for b in budgets} == {
        group for group, count in fewest.items() if count > 1
    }


def test_a_pod_outlives_its_longest_request(manifests: Any) -> None:
    """Longest request < a replica's grace < the drain's deadline < the pod's grace <= how long an old cluster stays."""
    config = manifests.serve_config()
    (app,) = config["applications"]
    longest_s = app["args"]["batching"].get("request_timeout_s", 30.0)
    for deployment in app["deployments"]:
        assert longest_s < deployment["graceful_shutdown_timeout_s"]
    grace_s = max(deployment["graceful_shutdown_timeout_s"] for deployment in app["deployments"])
    for group in manifests.ray_cluster()["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        drain = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        deadline_s = float(drain[drain.index("--deadline-s") + 1])
        assert 2 * grace_s <= deadline_s
        assert deadline_s + 20 + longest_s <= pod["terminationGracePeriodSeconds"]  # 20: until Ray was told to drain
        assert pod["terminationGracePeriodSeconds"] <= manifests.ray_service()["spec"]["rayClusterDeletionDelaySeconds"]
