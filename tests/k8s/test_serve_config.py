"""The application's configuration on a cluster is the project's, but for what is said to differ."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeDeploySchema

from deploy.settings import Settings

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = ["Ingress", "Encoder", "Scorer"]


@pytest.fixture(scope="module")
def generate(load_script: Callable[[str], ModuleType]) -> ModuleType:
    """k8s/generate.py."""
    return load_script("generate.py")


def unknown_keys(given: Any, parsed: Any, path: str = "") -> Iterator[str]:
    """Keys that Serve's schema passes over without a word."""
    schema: Any = AutoscalingConfig if path.endswith(".autoscaling_config.") else type(parsed)
    if isinstance(given, dict) and hasattr(schema, "model_fields"):
        for key, value in given.items():
            if key in schema.model_fields:
                yield from unknown_keys(value, getattr(parsed, key, None), f"{path}{key}.")
            else:
                yield f"{path}{key}"
    elif isinstance(given, list) and isinstance(parsed, list):
        for i, (one, other) in enumerate(zip(given, parsed, strict=True)):
            yield from unknown_keys(one, other, f"{path}{i}.")


def test_serve_knows_every_key(manifests: Any) -> None:
    """Serve's own schema takes it, autoscaling included, and passes over nothing."""
    config = manifests.serve_config()
    parsed = ServeDeploySchema.model_validate(config)
    assert list(unknown_keys(config, parsed)) == []
    (app,) = config["applications"]
    for deployment in app["deployments"]:
        AutoscalingConfig.model_validate(deployment["autoscaling_config"])


@pytest.mark.parametrize(
    "path",
    [
        "proxy_locaton",
        "applications.0.deployments.0.max_replica",
        "applications.0.deployments.1.autoscaling_config.min",
    ],
)
def test_unknown_keys_are_found(manifests: Any, path: str) -> None:
    """A misspelt key is found wherever it stands."""
    config = manifests.serve_config()
    place: Any = config
    *parents, last = path.split(".")
    for key in parents:
        place = place[int(key)] if key.isdigit() else place[key]
    place[last] = 1
    assert list(unknown_keys(config, ServeDeploySchema.model_validate(config))) == [path]


def test_the_application_takes_its_settings(manifests: Any) -> None:
    """tokenalign's own settings take the args: no unknown key, and no secret, only where to find one."""
    (app,) = manifests.serve_config()["applications"]
    settings = Settings.parse(app["args"])
    assert settings.model.local_files_only
    for secret in (settings.label_cache.password, settings.label_cache.signing_key):
        assert secret is not None
        assert secret.file is not None
    assert app["import_path"] == "deploy.app:build_app"


def test_it_listens_for_the_cluster(manifests: Any) -> None:
    """Every pod with a replica has a proxy, on the port that pods and policies name."""
    config = manifests.serve_config()
    assert config["proxy_location"] == "EveryNode"
    assert config["http_options"] == {"host": "0.0.0.0", "port": 8000}  # noqa: S104  of the pod; a NetworkPolicy is before it


def test_every_deployment_scales_by_itself(manifests: Any) -> None:
    """Each has bounds instead of a number; the encoder follows the tokens that wait."""
    (app,) = manifests.serve_config()["applications"]
    assert [deployment["name"] for deployment in app["deployments"]] == DEPLOYMENTS
    for deployment in app["deployments"]:
        assert "num_replicas" not in deployment
        scaling = deployment["autoscaling_config"]
        assert 0 < scaling["min_replicas"] < scaling["max_replicas"]
        if deployment["name"] == "Encoder":
            module, _, function = scaling["policy"]["policy_function"].partition(":")
            assert callable(getattr(__import__(module, fromlist=[function]), function))


def test_the_files_are_up_to_date(generate: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """What is committed is what k8s/generate.py makes of the project's settings today."""
    assert generate.main(["--check"]) == 0, capsys.readouterr().out


def test_a_change_of_the_project_is_noticed(
    k8s_copy: Callable[[], Path], load_script: Callable[[str], ModuleType]
) -> None:
    """When serve_config.yaml changes, every overlay is out of date until it is generated again."""
    k8s = k8s_copy()
    project = k8s.parent / "serve_config.yaml"
    generate = load_script("generate.py")
    config = yaml.safe_load(project.read_text())
    config["applications"][0]["args"]["batching"]["batches_per_encoder"] = 3
    project.write_text(yaml.safe_dump(config))
    for overlay in generate.overlays(k8s):
        text = generate.generated(overlay, project)
        assert text != (overlay / "serve_config.yaml").read_text()
        assert yaml.safe_load(text)["applications"][0]["args"]["batching"]["batches_per_encoder"] == 3


def test_what_differs_from_the_project_is_listed(manifests: Any) -> None:
    """Of the args, only these differ from serve_config.yaml: where things are, and what a GPU takes at once."""
    project = yaml.safe_load((ROOT / "serve_config.yaml").read_text())["applications"][0]["args"]
    (app,) = manifests.serve_config()["applications"]
    of_all = {"model.device", "model.local_files_only", "label_cache.url", "label_cache.username"}
    of_all |= {"label_cache.password", "label_cache.signing_key"}
    of_gpu = {"model.id_or_path", "model.backbone", "batching.max_batch_tokens", "batching.max_batch_texts"}
    of_gpu |= {"access.keys_file"}
    differing = {
        f"{section}.{key}"
        for section in project.keys() | app["args"].keys()
        for key in project.get(section, {}).keys() | app["args"].get(section, {}).keys()
        if project.get(section, {}).get(key) != app["args"].get(section, {}).get(key)
    }
    wanted = of_all | (
        {"threads.encoder", "access.allow_unauthenticated"} if manifests.overlay == "cpu-dev" else of_gpu
    )
    assert differing == wanted | ({"label_cache.tls_ca_file"} if manifests.overlay.endswith("components") else set())


@pytest.mark.parametrize(
    ("old", "new", "merged"),
    [
        ({"a": 1, "b": 2}, {"b": 3, "c": 4}, {"a": 1, "b": 3, "c": 4}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": None}}, {"a": {"b": 1}}),
        (
            [{"name": "x", "a": 1}, {"name": "y"}],
            [{"name": "x", "b": 2}],
            [{"name": "x", "a": 1, "b": 2}, {"name": "y"}],
        ),
        ([1, 2], [3], [3]),
        ({"a": 1}, {"a": {"b": 2}}, {"a": {"b": 2}}),
    ],
)
def test_merging(generate: ModuleType, old: Any, new: Any, merged: Any) -> None:
    """Mappings by key, null takes away, named lists by name, anything else is replaced; nothing is changed in place."""
    before = copy.deepcopy((old, new))
    assert generate.merge(old, new) == merged
    assert (old, new) == before


def test_a_change_for_nobody_is_an_error(generate: ModuleType) -> None:
    """A deployment that serve_config.yaml doesn't have is a mistake, and named."""
    with pytest.raises(ValueError, match="Encodr"):
        generate.merge([{"name": "Encoder"}], [{"name": "Encodr"}])
