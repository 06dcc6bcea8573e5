"""Pods have no more rights than they need, and talk to nobody but whom they must."""

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from deploy import front

WRITABLE = {"/tmp", "/tmp/ray", "/dev/shm", "/home/tokenalign", "/data"}  # noqa: S108  paths in a pod


def containers(manifests: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, container) of every container, the autoscaler's part of one included."""
    for where, template in manifests.pod_templates():
        for container in template["spec"]["containers"]:
            yield where, container
    yield "autoscaler", manifests.ray_cluster()["autoscalerOptions"]


def test_the_namespace_enforces_the_restricted_standard(manifests: Any) -> None:
    """A pod that asks for more is not admitted, whoever makes it."""
    (namespace,) = manifests.of("Namespace")
    labels = namespace["metadata"]["labels"]
    assert [labels[f"pod-security.kubernetes.io/{mode}"] for mode in ("enforce", "audit", "warn")] == ["restricted"] * 3


def test_pods_meet_the_restricted_standard(manifests: Any) -> None:
    """Every control of the standard holds: no root, no host, no capability, RuntimeDefault, no privilege gained."""
    for where, template in manifests.pod_templates():
        pod = template["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers", "ephemeralContainers"} & pod.keys(), where
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] >= 10_000  # no user of the node has such an id
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "sysctls" not in security
        allowed = {"emptyDir", "configMap", "secret", "projected", "persistentVolumeClaim"}
        assert all((volume.keys() - {"name"}) <= allowed for volume in pod["volumes"])
        assert not any("hostPort" in port for container in pod["containers"] for port in container["ports"])
    for where, container in containers(manifests):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        }, where


def test_only_scratch_and_data_are_writable(manifests: Any) -> None:
    """Whatever else is mounted is read-only: settings, secrets, scripts, weights."""
    for where, container in containers(manifests):
        for mount in container["volumeMounts"]:
            assert mount.get("readOnly", False) != (mount["mountPath"] in WRITABLE), f"{where} {mount}"


def test_ray_has_the_folders_that_it_writes(manifests: Any) -> None:
    """With a read-only root, Ray's session, shared memory, temporary files and home are volumes with a bound."""
    for where, template in manifests.pod_templates():
        (container,) = template["spec"]["containers"]
        paths = {mount["mountPath"] for mount in container["volumeMounts"]}
        if where not in {"label-cache", "gcs-redis"}:
            assert {"/tmp", "/tmp/ray", "/dev/shm", "/home/tokenalign"} <= paths  # noqa: S108
        for volume in template["spec"]["volumes"]:
            assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"]


def test_shared_memory_holds_the_object_store(manifests: Any, amount: Callable[[Any], float]) -> None:
    """It is memory, larger than the object store and at most half of what the container may use."""
    cluster = manifests.ray_cluster()
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (shared,) = (volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shared-mem")
        store = float(group["rayStartParams"]["object-store-memory"])
        assert shared["medium"] == "Memory"
        assert store < amount(shared["sizeLimit"])
        assert 2 * amount(shared["sizeLimit"]) <= amount(pod["containers"][0]["resources"]["limits"]["memory"])


def test_every_container_is_bounded(manifests: Any, amount: Callable[[Any], float]) -> None:
    """CPU and memory are asked for and limited; memory is all one's own, so that a full node kills no bystander."""
    for where, container in containers(manifests):
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert {"cpu", "memory"} <= requests.keys() <= limits.keys(), where
        assert requests["memory"] == limits["memory"]
        assert amount(requests["cpu"]) <= amount(limits["cpu"])


def test_nobody_gets_a_token_of_the_api_but_the_autoscaler(manifests: Any) -> None:
    """No pod has one mounted by default, and the head's is mounted into the autoscaler's container alone."""
    for _, template in manifests.pod_templates():
        assert template["spec"]["automountServiceAccountToken"] is False
    holders = {
        where
        for where, container in containers(manifests)
        if any("serviceaccount" in mount["mountPath"] for mount in container["volumeMounts"])
    }
    assert holders == {"autoscaler"}


def test_every_container_is_probed(manifests: Any) -> None:
    """It has time to start, is restarted when it hangs, and gets no traffic before it can answer."""
    for _, template in manifests.pod_templates():
        (container,) = template["spec"]["containers"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe].keys() >= {"periodSeconds", "timeoutSeconds", "failureThreshold"}
        started_s = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
        assert started_s >= 300


def test_ray_is_asked_where_it_answers_without_a_token(manifests: Any) -> None:
    """Of the head its state and of a worker its raylet; ready is a worker whose proxy is."""
    for where, template in manifests.pod_templates():
        (container,) = template["spec"]["containers"]
        if "httpGet" not in container["livenessProbe"]:
            continue
        names = ("startupProbe", "livenessProbe", "readinessProbe")
        asked = {name: container[name]["httpGet"] for name in names}
        if where == "head":
            server, path, port = "http_server_head.py", "/api/gcs_healthz", 8265
        else:
            server, path, port = "http_server_agent.py", "/api/local_raylet_healthz", 52365
        wanted = {name: {"path": path, "port": port} for name in names}
        if where != "head":
            wanted["readinessProbe"] = {"path": "/-/healthz", "port": 8000}
        assert asked == wanted
        # Ray's list of what needs no token: the kubelet has none.
        public = (
            (Path(ray.__path__[0]) / "dashboard" / server).read_text().lower().partition("public_exact_paths = ")[2]
        )
        assert f'"{path}"' in re.split("[]}]", public)[0]


def test_no_pod_waits_for_a_model_hub(manifests: Any) -> None:
    """Weights are in the image or on a volume, and nothing may leave the cluster: Ray's pods don't try."""
    cluster = manifests.ray_cluster()
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert {"name": "HF_HUB_OFFLINE", "value": "1"} in container["env"]


def test_redis_is_probed_without_a_password_to_be_seen(manifests: Any) -> None:
    """The probe's user may ping and no more, and its password is in no argument of a command."""
    for where in ("label-cache", "gcs-redis"):
        (container,) = manifests.one("StatefulSet", where)["spec"]["template"]["spec"]["containers"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            shell, flag, words = container[probe]["exec"]["command"]
            assert (shell, flag) == ("sh", "-c")
            first, command, *arguments = shlex.split(words)
            assert first == "REDISCLI_AUTH=$(cat /etc/redis/auth/probe-password)"
            assert command == "redis-cli"
            assert not {"-a", "--pass"} & set(arguments)
            assert arguments[arguments.index("--user") + 1] == "probe"


def test_redis_keeps_within_its_memory(manifests: Any, amount: Callable[[Any], float]) -> None:
    """maxmemory leaves half of the container's for buffers and for rewriting the log, which the disk holds twice."""
    policies = {}
    for where in ("label-cache", "gcs-redis"):
        stateful_set = manifests.one("StatefulSet", where)
        pod = stateful_set["spec"]["template"]["spec"]
        (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "config")
        settings = dict(
            line.split(maxsplit=1)
            for line in manifests.one("ConfigMap", volume["configMap"]["name"])["data"]["redis.conf"].splitlines()
            if line and not line.startswith("#")
        )
        maxmemory = amount(settings["maxmemory"].replace("gb", "Gi").replace("mb", "Mi"))
        (claim,) = stateful_set["spec"]["volumeClaimTemplates"]
        assert 2 * maxmemory <= amount(pod["containers"][0]["resources"]["limits"]["memory"])
        assert 3 * maxmemory <= amount(claim["spec"]["resources"]["requests"]["storage"])
        assert settings["appendonly"] == "yes"
        assert settings["aclfile"] == "/etc/redis/auth/users.acl"
        policies[where] = settings["maxmemory-policy"]
    assert policies == {"label-cache": "volatile-lfu", "gcs-redis": "noeviction"}


def test_nobody_asks_without_a_key_in_production(manifests: Any) -> None:
    """The gpu overlay asks for keys, hashed in a Secret; cpu-dev says in so many words that it doesn't."""
    (app,) = manifests.serve_config()["applications"]
    expected = {"keys_file": "/etc/tokenalign/access/keys"}
    assert app["args"]["access"] == (expected if "gpu" in manifests.overlay else {"allow_unauthenticated": True})


def test_pods_have_the_switches_of_one_machine(manifests: Any) -> None:
    """All of Ray's pods set what `tokenalign-deploy serve` sets; ports and files of HAProxy are the pod's alone."""
    ends = {
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "45",
    }
    for where, template in manifests.pod_templates():
        if where not in {"label-cache", "gcs-redis"}:
            (container,) = template["spec"]["containers"]
            found = {one["name"]: one["value"] for one in container["env"] if one["name"].startswith("RAY_SERVE_")}
            assert found == {**front.CALLS, **front.HAPROXY, **ends}


Flow = tuple[str, str, int]
"""From whom, to which pods, at which port. A source in capitals is outside the namespace."""

PORTS = (22, 6379, 8000, 8080, 8265, 8404, 9101, 10001, 30000, 40000, 52365)
"""All that some program in a pod listens on, one of those that Ray chooses, and one that nobody needs."""

WANTED: set[Flow] = {
    ("OPERATOR", "head", 8265),
    ("GATEWAY", "cpu", 8000),
    ("GATEWAY", "encoder", 8000),
    ("cpu", "label-cache", 6379),
    ("head", "gcs-redis", 6379),
    *(("MONITORING", ray, 8080) for ray in ("head", "cpu", "encoder")),
    *((one, other, port) for one in ("head", "cpu", "encoder") for other in ("head", "cpu", "encoder")
      for port in PORTS if port >= 1_024),
}  # fmt: skip
OUTSIDE = {
    "OPERATOR": ("kuberay-system", {"app.kubernetes.io/name": "kuberay-operator"}),
    "GATEWAY": ("gateway", {}),
    "MONITORING": ("monitoring", {}),
    "STRANGER": ("default", {}),
}


@pytest.fixture(scope="module")
def flows(manifests: Any) -> set[Flow]:
    """All flows that the policies let through, of those that begin and end with the pods and outsiders above."""
    pods = {where: template["metadata"]["labels"] for where, template in manifests.pod_templates()}
    policies = [document["spec"] for document in manifests.of("NetworkPolicy")]
    inside = {
        (source, target, port) for source in pods for target in pods for port in PORTS
        if allows(policies, "Egress", pods[source], None, pods[target], port)
        and allows(policies, "Ingress", pods[target], None, pods[source], port)
    }  # fmt: skip
    outside = {
        (source, target, port) for source, (namespace, labels) in OUTSIDE.items() for target in pods for port in PORTS
        if allows(policies, "Ingress", pods[target], namespace, labels, port)
    }  # fmt: skip
    return inside | outside


def allows(
    policies: list[dict[str, Any]],
    way: str,
    own: dict[str, str],
    namespace: str | None,
    peer: dict[str, str],
    port: int,
) -> bool:
    """Whether pods labelled `own` may talk `way` with pods labelled `peer`, in a namespace or their own (None)."""
    chosen = [spec for spec in policies if way in spec["policyTypes"] and matches(spec["podSelector"], own)]
    rules = [rule for spec in chosen for rule in spec.get(way.lower(), [])]
    side = "from" if way == "Ingress" else "to"
    return not chosen or any(
        any(is_peer(one, namespace, peer) for one in rule[side]) and any(has_port(one, port) for one in rule["ports"])
        for rule in rules
    )


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector chooses these labels."""
    by_label = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return by_label and all(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", []))


def is_peer(peer: dict[str, Any], namespace: str | None, labels: dict[str, str]) -> bool:
    """Whether a peer of a rule is a pod with these labels in that namespace."""
    if "ipBlock" in peer:
        return False
    selector = peer.get("namespaceSelector")
    at_home = selector is None and namespace is None
    named = selector is not None and matches(selector, {"kubernetes.io/metadata.name": namespace or "tokenalign"})
    return (at_home or named) and matches(peer.get("podSelector", {}), labels)


def has_port(rule: dict[str, Any], port: int) -> bool:
    """Whether a rule's TCP port, or range, holds a port."""
    first: int = rule["port"]
    last: int = rule.get("endPort", first)
    return rule["protocol"] == "TCP" and first <= port <= last


def test_who_may_talk_to_whom(flows: set[Flow]) -> None:
    """Exactly these flows: a stranger reaches nothing, and of both Redis each has its own users alone."""
    assert flows == WANTED


def test_everything_is_denied_first(manifests: Any) -> None:
    """One policy chooses every pod, both ways, and lets nothing through."""
    assert manifests.one("NetworkPolicy", "default-deny")["spec"] == {
        "podSelector": {},
        "policyTypes": ["Ingress", "Egress"],
    }


def test_ways_out_of_the_cluster_are_few(manifests: Any) -> None:
    """Every pod may ask for names; the head alone may go elsewhere, to the Kubernetes API's ports."""
    out = [
        (document["metadata"]["name"], document["spec"]["podSelector"], rule)
        for document in manifests.of("NetworkPolicy")
        for rule in document["spec"].get("egress", [])
        if any("podSelector" not in peer or "namespaceSelector" in peer for peer in rule["to"])
    ]
    assert [name for name, _, _ in out] == ["dns", "ray-head-to-kubernetes"]
    assert {port["port"] for port in out[0][2]["ports"]} == {53}
    assert out[1][1]["matchLabels"]["app.kubernetes.io/component"] == "ray-head"
    assert {port["port"] for port in out[1][2]["ports"]} == {443, 6443}
