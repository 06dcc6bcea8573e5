"""checkov has nothing to say but what is listed. It has many dependencies, so an environment of its own."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1_800)]

VERSION = "3.3.30"
ROOT = Path(__file__).parents[2]
KUBERNETES_REASONS: dict[str, str] = {}
DOCKERFILE_REASONS = {
    "CKV_DOCKER_7": "the base image is an argument, whose digest the deployer gives",
}


@pytest.fixture(scope="module")
def checkov(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., set[str]]:
    """Runs checkov with these arguments; gives the ids of the checks that failed, once it has checked something."""
    folder = tmp_path_factory.mktemp("checkov")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", f"checkov=={VERSION}"], check=True)

    def run(*arguments: str) -> set[str]:
        command = [str(folder / "bin" / "checkov"), *arguments, "--output", "json", "--skip-download", "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        report = json.loads(done.stdout)
        assert report["summary"]["passed"] + report["summary"]["failed"] > 20
        return {failed["check_id"] for failed in report["results"]["failed_checks"]}

    return run


def pods(manifests: Any) -> list[dict[str, Any]]:
    """The manifests, and the pods within the RayService, where checkov does not look."""
    found = list(manifests.documents)
    for where, template in manifests.pod_templates():
        metadata = {**template["metadata"], "name": where, "namespace": "tokenalign"}
        found.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
    return found


def test_manifests(manifests: Any, checkov: Callable[..., set[str]], tmp_path: Path) -> None:
    """Every check passes, of the Ray pods too, but for those with a reason."""
    path = tmp_path / "manifests.yaml"
    path.write_text(yaml.safe_dump_all(pods(manifests)))
    assert checkov("--file", str(path), "--framework", "kubernetes") == KUBERNETES_REASONS.keys()


def test_it_can_fail(manifests: Any, checkov: Callable[..., set[str]], tmp_path: Path) -> None:
    """A Ray pod that may gain privileges is found."""
    documents = pods(manifests)
    documents[-1]["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    path = tmp_path / "manifests.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    assert "CKV_K8S_20" in checkov("--file", str(path), "--framework", "kubernetes")


def test_dockerfile(checkov: Callable[..., set[str]]) -> None:
    """Every check passes, but for those with a reason."""
    assert checkov("--file", str(ROOT / "Dockerfile"), "--framework", "dockerfile") == DOCKERFILE_REASONS.keys()
