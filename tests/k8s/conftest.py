"""Fixtures that render the overlays with the kustomize of kubectl, and load the scripts of k8s/."""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
KUBECTL = Path(sys.executable).parent / "kubectl"  # of the pinned wheel, whatever else the machine has

Document = dict[str, Any]


@dataclass(frozen=True)
class Manifests:
    """What an overlay renders to."""

    overlay: str
    documents: list[Document]

    def of(self, *kinds: str) -> list[Document]:
        """All documents of these kinds."""
        return [document for document in self.documents if document["kind"] in kinds]

    def one(self, kind: str, name: str) -> Document:
        """The only document of a kind with a name."""
        (found,) = (document for document in self.of(kind) if document["metadata"]["name"] == name)
        return found

    def ray_service(self) -> Document:
        """The RayService."""
        return self.one("RayService", "tokenalign")

    def ray_cluster(self) -> Document:
        """The rayClusterConfig of the RayService."""
        cluster: Document = self.ray_service()["spec"]["rayClusterConfig"]
        return cluster

    def serve_config(self) -> Document:
        """The application's configuration, as Serve will read it."""
        config: Document = yaml.safe_load(self.ray_service()["spec"]["serveConfigV2"])
        return config

    def pod_templates(self) -> Iterator[tuple[str, Document]]:
        """(where, template) of every pod that the manifests lead to."""
        cluster = self.ray_cluster()
        yield "head", cluster["headGroupSpec"]["template"]
        for group in cluster["workerGroupSpecs"]:
            yield group["groupName"], group["template"]
        for stateful_set in self.of("StatefulSet"):
            yield stateful_set["metadata"]["name"], stateful_set["spec"]["template"]


def render(folder: Path) -> list[Document]:
    """The documents of an overlay; the test fails with kustomize's words where it refuses."""
    done = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def script(path: Path) -> ModuleType:
    """A script of k8s/ as a module."""
    spec = importlib.util.spec_from_file_location(f"k8s_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """Loads a script by its path below k8s/."""
    return lambda name: script(K8S / name)


@pytest.fixture(scope="session")
def k8s_copy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes a copy of k8s/ beside a copy of serve_config.yaml, to be changed at will."""

    def copy() -> Path:
        folder = tmp_path_factory.mktemp("project")
        shutil.copy(ROOT / "serve_config.yaml", folder)
        return Path(shutil.copytree(K8S, folder / "k8s"))

    return copy


@pytest.fixture(scope="session")
def render_overlay() -> Callable[[Path], Manifests]:
    """Renders the overlay in a folder."""
    return lambda folder: Manifests(folder.name, render(folder))


def with_all_components(k8s: Path) -> Path:
    """The gpu overlay of a copy of k8s/, with every component, its configuration made anew as the docs say."""
    overlay = k8s / "overlays" / "gpu"
    path = overlay / "kustomization.yaml"
    kustomization = yaml.safe_load(path.read_text())
    kustomization["components"] = sorted(f"../../components/{folder.name}" for folder in (k8s / "components").iterdir())
    path.write_text(yaml.safe_dump(kustomization))
    generate = script(k8s / "generate.py")
    (overlay / "serve_config.yaml").write_text(generate.generated(overlay, k8s.parent / "serve_config.yaml"))
    return overlay


@pytest.fixture(scope="session", params=["cpu-dev", "gpu", "gpu with all components"])
def manifests(request: pytest.FixtureRequest, k8s_copy: Callable[[], Path]) -> Manifests:
    """Each overlay as it is, and the gpu overlay with all that can be added to it."""
    name: str = request.param
    folder = with_all_components(k8s_copy()) if name.endswith("all components") else K8S / "overlays" / name
    return Manifests(name, render(folder))


@pytest.fixture(scope="session")
def crd(data_root: Path) -> Document:
    """The RayService definition of KubeRay 1.7.0."""
    definition: Document = yaml.load(
        (data_root / "kuberay" / "ray.io_rayservices.v1.7.0.yaml").read_text(), Loader=yaml.CSafeLoader
    )
    return definition


@pytest.fixture(scope="session")
def pinned() -> dict[str, str]:
    """The versions of constraints.txt by name in lower case."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {name.lower(): version for name, _, version in (line.partition("==") for line in lines if "==" in line)}


@pytest.fixture(scope="session")
def amount() -> Callable[[Any], float]:
    """A quantity of Kubernetes as a number: bytes, cores or pieces."""
    units = {"m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}

    def of(quantity: Any) -> float:
        for unit, size in units.items():
            if str(quantity).endswith(unit):
                return float(str(quantity).removesuffix(unit)) * size
        return float(quantity)

    return of
