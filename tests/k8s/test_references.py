"""What one manifest names in another is there: labels, ports, volumes, Secrets, Services, room for every replica."""

from collections.abc import Callable
from typing import Any

OF_THE_DEPLOYER = {
    ("Secret", "label-cache-auth"): {"password", "signing-key", "probe-password", "users.acl"},
    ("Secret", "gcs-redis-auth"): {"username", "password", "probe-password", "users.acl"},
    ("Secret", "api-keys"): {"keys"},
    ("Secret", "label-cache-tls"): {"ca.crt", "tls.crt", "tls.key"},
    ("PersistentVolumeClaim", "tokenalign-models"): set(),
}
"""What docs/kubernetes.md tells the deployer to make, with its keys."""

OF_KUBERNETES = {"kube-root-ca.crt"}
GROUP_LABEL = "tokenalign.group"


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector chooses these labels."""
    wanted: dict[str, str] = selector.get("matchLabels", {})
    chosen = all(labels.get(key) == value for key, value in wanted.items())
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        chosen = chosen and labels.get(expression["key"]) in expression["values"]
    return chosen


def labels_of(manifests: Any) -> dict[str, dict[str, str]]:
    """The labels of each kind of pod."""
    return {where: template["metadata"]["labels"] for where, template in manifests.pod_templates()}


def chosen(manifests: Any, selector: dict[str, Any]) -> set[str]:
    """The kinds of pods that a selector chooses."""
    return {where for where, labels in labels_of(manifests).items() if matches(selector, labels)}


def references(value: Any) -> list[tuple[str, str, set[str]]]:
    """(kind, name, keys) of every Secret, ConfigMap and claim that is named below a value."""
    found = []
    if isinstance(value, list):
        return [reference for item in value for reference in references(item)]
    if not isinstance(value, dict):
        return []
    if isinstance(secret := value.get("secret"), dict):
        found.append(("Secret", secret["secretName"], {item["key"] for item in secret.get("items", [])}))
    if isinstance(config := value.get("configMap"), dict):
        found.append(("ConfigMap", config["name"], {item["key"] for item in config.get("items", [])}))
    if isinstance(key := value.get("secretKeyRef"), dict):
        found.append(("Secret", key["name"], {key["key"]}))
    if isinstance(claim := value.get("persistentVolumeClaim"), dict):
        found.append(("PersistentVolumeClaim", claim["claimName"], set()))
    return found + [reference for item in value.values() for reference in references(item)]


def test_everything_lives_in_one_namespace(manifests: Any) -> None:
    """The namespace is made by the manifests, and nothing is put elsewhere."""
    (namespace,) = manifests.of("Namespace")
    others = [document for document in manifests.documents if document["kind"] != "Namespace"]
    assert {document["metadata"]["namespace"] for document in others} == {namespace["metadata"]["name"]}
    names = [(document["kind"], document["metadata"]["name"]) for document in manifests.documents]
    assert len(set(names)) == len(names)


def test_no_secret_is_in_the_manifests(manifests: Any) -> None:
    """Secrets are the deployer's; no manifest is one or holds one."""
    assert manifests.of("Secret") == []
    for name, value in scalars(manifests.documents):
        secret = ("password", "token", "signing_key", "redisPassword", "redisUsername")
        assert not (name in secret and isinstance(value, str)), f"{name}: {value}"


def scalars(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """(key, value) of every scalar."""
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in scalars(item, key)]
    if isinstance(value, list):
        return [pair for item in value for pair in scalars(item, name)]
    return [(name, value)]


def test_what_is_named_is_there(manifests: Any) -> None:
    """Every ConfigMap with its keys is made here; every Secret and claim, with its keys, is on the deployer's list."""
    made = {document["metadata"]["name"]: document["data"].keys() for document in manifests.of("ConfigMap")}
    found = references([template for _, template in manifests.pod_templates()])
    found += references(manifests.ray_cluster()["gcsFaultToleranceOptions"])
    assert found
    for kind, name, keys in found:
        if kind == "ConfigMap":
            assert name in OF_KUBERNETES or keys <= made[name]
        else:
            assert keys <= OF_THE_DEPLOYER[kind, name]


def test_the_secrets_script_makes_what_is_named(load_script: Callable[[str], Any]) -> None:
    """k8s/make_secrets.py prints the first two of the deployer's list, with these keys."""
    script = load_script("make_secrets.py")
    for secret in (script.label_cache_secret(), script.gcs_secret()):
        assert secret["stringData"].keys() == OF_THE_DEPLOYER["Secret", secret["metadata"]["name"]]


def test_mounts_have_volumes(manifests: Any) -> None:
    """Each mount names a volume of its pod, each volume is mounted, and no path is mounted twice."""
    autoscaler = manifests.ray_cluster()["autoscalerOptions"]["volumeMounts"]
    for where, template in manifests.pod_templates():
        pod = template["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        if where in {"label-cache", "gcs-redis"}:
            claims = manifests.one("StatefulSet", where)["spec"]["volumeClaimTemplates"]
            volumes |= {claim["metadata"]["name"] for claim in claims}
        mounts = [container["volumeMounts"] for container in pod["containers"]]
        mounts += [autoscaler] if where == "head" else []
        assert {mount["name"] for one in mounts for mount in one} == volumes
        for one in mounts:
            paths = [mount["mountPath"] for mount in one]
            assert len(set(paths)) == len(paths)


def test_services_lead_to_pods(manifests: Any) -> None:
    """Each Service chooses one kind of pod, and its target port is one of that pod's by name."""
    templates = dict(manifests.pod_templates())
    services = manifests.of("Service")
    assert {service["metadata"]["name"] for service in services} == {"label-cache", "gcs-redis"}
    for service in services:
        (where,) = chosen(manifests, {"matchLabels": service["spec"]["selector"]})
        names = {port["name"]: port for port in templates[where]["spec"]["containers"][0]["ports"]}
        for port in service["spec"]["ports"]:
            assert port["port"] == names[port["targetPort"]]["containerPort"]


def test_stateful_sets_choose_their_own_pods(manifests: Any) -> None:
    """Selector and template agree, and the governing Service exists."""
    services = {service["metadata"]["name"] for service in manifests.of("Service")}
    for stateful_set in manifests.of("StatefulSet"):
        assert chosen(manifests, stateful_set["spec"]["selector"]) == {stateful_set["metadata"]["name"]}
        assert stateful_set["spec"]["serviceName"] in services


def test_every_selector_chooses_something(manifests: Any) -> None:
    """Budgets, monitors and spreads choose the pods that they are for."""
    for budget in manifests.of("PodDisruptionBudget"):
        assert len(chosen(manifests, budget["spec"]["selector"])) == 1
    for monitor in manifests.of("PodMonitor"):
        assert chosen(manifests, monitor["spec"]["selector"]) == {"head", "cpu", "encoder"}
        templates = dict(manifests.pod_templates())
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            for where in chosen(manifests, monitor["spec"]["selector"]):
                ports = {port["name"] for port in templates[where]["spec"]["containers"][0]["ports"]}
                assert endpoint["port"] in ports
    for group in manifests.ray_cluster()["workerGroupSpecs"]:
        for spread in group["template"]["spec"]["topologySpreadConstraints"]:
            assert chosen(manifests, spread["labelSelector"]) == {group["groupName"]}


def test_the_application_finds_its_stores(manifests: Any) -> None:
    """The label cache and Ray's own Redis are Services of these manifests, on their ports, and not the same one."""
    (app,) = manifests.serve_config()["applications"]
    addresses = {
        "label-cache": app["args"]["label_cache"]["url"],
        "gcs-redis": manifests.ray_cluster()["gcsFaultToleranceOptions"]["redisAddress"],
    }
    for name, url in addresses.items():
        scheme, _, rest = url.partition("://")
        assert scheme in {"redis", "rediss"}
        assert rest.split("/")[0] == f"{name}:{manifests.one('Service', name)['spec']['ports'][0]['port']}"
    tls = app["args"]["label_cache"]["url"].startswith("rediss:")
    assert tls == manifests.overlay.endswith("all components")
    assert tls == (
        "--tls-port"
        in manifests.one("StatefulSet", "label-cache")["spec"]["template"]["spec"]["containers"][0]["command"]
    )


def test_the_application_finds_its_files(manifests: Any) -> None:
    """Each file that the settings name lies in a volume of the pods whose replicas read it."""
    (app,) = manifests.serve_config()["applications"]
    cache, model = app["args"]["label_cache"], app["args"]["model"]
    of_cpu = [cache["password"]["file"], cache["signing_key"]["file"], cache.get("tls_ca_file")]
    of_cpu.append(app["args"]["access"].get("keys_file"))
    of_all = [path for path in (model["id_or_path"], model.get("backbone")) if path]
    groups = {group["groupName"]: group["template"]["spec"] for group in manifests.ray_cluster()["workerGroupSpecs"]}
    for name, pod in groups.items():
        mounted = files_of(pod)
        for path in [*of_all, *(path for path in of_cpu if path and name == "cpu")]:
            assert any(path == one or path.startswith(f"{one}/") for one in mounted), f"{path} in {name}"


def files_of(pod: dict[str, Any]) -> set[str]:
    """Files that the volumes bring by name, and folders of volumes that don't say."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    found = set()
    for mount in pod["containers"][0]["volumeMounts"]:
        items = volumes[mount["name"]].get("secret", {}).get("items")
        if "emptyDir" not in volumes[mount["name"]]:
            found |= {f"{mount['mountPath']}/{item['path']}" for item in items} if items else {mount["mountPath"]}
    return found


def test_replicas_find_their_nodes(manifests: Any, amount: Callable[[Any], float]) -> None:
    """Each deployment's label is one group's; a replica fits a pod, fewest and most fit the fewest and most pods."""
    (app,) = manifests.serve_config()["applications"]
    for group in manifests.ray_cluster()["workerGroupSpecs"]:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        room = {"num_cpus": amount(limits["cpu"]), "num_gpus": amount(limits.get("nvidia.com/gpu", 0))}
        assert group["labels"] == {GROUP_LABEL: group["groupName"]}
        mine = [
            deployment
            for deployment in app["deployments"]
            if deployment["ray_actor_options"]["label_selector"] == group["labels"]
        ]
        assert mine
        for resource, of_pod in room.items():
            wanted = [(d["ray_actor_options"].get(resource, 0), d["autoscaling_config"]) for d in mine]
            assert max(size for size, _ in wanted) <= of_pod
            assert sum(size * scale["max_replicas"] for size, scale in wanted) <= of_pod * group["maxReplicas"]
            assert sum(size * scale["min_replicas"] for size, scale in wanted) <= of_pod * group["minReplicas"]
    groups = {group["groupName"] for group in manifests.ray_cluster()["workerGroupSpecs"]}
    assert {d["ray_actor_options"]["label_selector"][GROUP_LABEL] for d in app["deployments"]} == groups


def test_a_gpu_is_for_encoders_alone(manifests: Any) -> None:
    """Where pods have GPUs, they are the encoders', which ask for one each; where none has, nothing asks for one."""
    (app,) = manifests.serve_config()["applications"]
    gpu = {
        group["groupName"]
        for group in manifests.ray_cluster()["workerGroupSpecs"]
        if "nvidia.com/gpu" in group["template"]["spec"]["containers"][0]["resources"]["limits"]
    }
    assert gpu == (set() if manifests.overlay == "cpu-dev" else {"encoder"})
    asking = {d["name"] for d in app["deployments"] if d["ray_actor_options"].get("num_gpus")}
    assert asking == ({"Encoder"} if gpu else set())


def test_threads_follow_the_limits(manifests: Any, amount: Callable[[Any], float]) -> None:
    """On CPUs the encoder's threads are stated: a replica that counts cores sees the machine's, not the pod's."""
    (app,) = manifests.serve_config()["applications"]
    if app["args"]["model"]["device"] == "cpu":
        (group,) = (g for g in manifests.ray_cluster()["workerGroupSpecs"] if g["groupName"] == "encoder")
        cpus = amount(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
        (encoder,) = (d for d in app["deployments"] if d["name"] == "Encoder")
        assert 0 < app["args"]["threads"]["encoder"] <= cpus
        assert app["args"]["threads"]["encoder"] == encoder["ray_actor_options"]["num_cpus"]
