"""The image: its Dockerfile, what is locked into it, and its build's commands as far as they go without Docker."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
HADOLINT = Path(sys.executable).parent / "hadolint"
TARGETS = ("cpu", "gpu")
ONLY_GPU = re.compile(r"^(nvidia|cuda|triton)(-|$)")
LINE = re.compile(r"^([a-z0-9-]+)==(\S+) --hash=sha256:([0-9a-f]{64})$")


def locked(target: str) -> dict[str, str]:
    """Versions by name, of a lock of which every line is one package with one hash."""
    lines = (ROOT / "k8s" / "image" / f"{target}.lock").read_text().splitlines()[1:]
    found = [LINE.match(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    return {match[1]: match[2] for match in found if match}


def instructions(stage: str) -> list[tuple[str, str]]:
    """(keyword, rest) of the instructions of a stage, continued lines joined, comments left out."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found, current = [], ""
    for line in filter(None, text.splitlines()):
        keyword, _, rest = line.partition(" ")
        if keyword == "FROM":
            current = rest.split()[-1]
        elif current == stage:
            found.append((keyword, " ".join(rest.split())))
    return found


def test_the_dockerfile_is_clean(tmp_path: Path) -> None:
    """hadolint has nothing to say of it, at any level, and does of one that installs what is newest as root."""
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}  # no settings but the project's
    done = subprocess.run([HADOLINT, DOCKERFILE], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, "")
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python:latest\nRUN pip install ray\nUSER root\n")
    done = subprocess.run([HADOLINT, bad], capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    assert {"DL3007", "DL3013", "DL3002"} <= set(re.findall(r"DL\d+", done.stdout))


def test_the_image_runs_as_the_pods_do(manifests: object) -> None:
    """Its user has the number that the pods run as, its home and path are theirs, and nothing probes it from within."""
    runtime = instructions("runtime")
    user = manifests.ray_cluster()["headGroupSpec"]["template"]["spec"]["securityContext"]  # type: ignore[attr-defined]
    assert ("USER", f"{user['runAsUser']}:{user['runAsGroup']}") in runtime
    assert ("HEALTHCHECK", "NONE") in runtime
    (environment,) = (rest for keyword, rest in runtime if keyword == "ENV")
    assert "HOME=/home/tokenalign" in environment
    assert "PATH=/opt/tokenalign/bin:$PATH" in environment
    (users,) = (rest for keyword, rest in runtime if keyword == "RUN")
    assert f"useradd --uid {user['runAsUser']} " in users
    assert "export PATH=/opt/tokenalign/bin:" in users  # also under a login shell


@pytest.mark.parametrize("target", TARGETS)
def test_targets_end_as_nobody_special(target: str) -> None:
    """A target adds its environment to what both share, and goes back to no other user."""
    assert {keyword for keyword, _ in instructions(target)} <= {"COPY", "ENV"}
    assert ("COPY", f"--from=build-{target} /opt/tokenalign /opt/tokenalign") in instructions(target)


@pytest.mark.parametrize("target", TARGETS)
def test_everything_that_is_installed_is_checked(target: str) -> None:
    """pip installs from the lock with hashes, then the project without an index; nothing else is installed."""
    runs = [rest for keyword, rest in instructions(f"build-{target}") if keyword == "RUN"]
    installs = [command.strip() for run in runs for command in run.split("&&") if "pip install" in command]
    assert installs == [
        "/opt/tokenalign/bin/pip install --no-compile --no-deps --only-binary :all: --require-hashes "
        f"-r /src/{target}.lock",
        "/opt/tokenalign/bin/pip install --no-compile --no-deps --no-index --no-build-isolation /src",
    ]
    assert not re.search(r"curl|wget|apt-get|https?://", DOCKERFILE.read_text())


@pytest.mark.parametrize("target", TARGETS)
def test_the_lock_is_the_tested_set(target: str, pinned: dict[str, str]) -> None:
    """Each locked version is the one of constraints.txt; what isn't there comes with CUDA, or builds the project."""
    tested = {re.sub(r"[-_.]+", "-", name): version for name, version in pinned.items()}
    for name, version in locked(target).items():
        if name in tested:
            assert version.removesuffix("+cpu") == tested[name], name
        else:
            assert name == "setuptools" or ONLY_GPU.match(name), name


def test_the_locks_differ_in_torch_alone() -> None:
    """Both images hold the same versions, but for torch's build and what it brings for CUDA."""
    cpu, gpu = locked("cpu"), locked("gpu")
    assert cpu["torch"] == f"{gpu['torch']}+cpu"
    assert not any(ONLY_GPU.match(name) for name in cpu)
    assert {name: version for name, version in gpu.items() if not ONLY_GPU.match(name)} == cpu | {"torch": gpu["torch"]}
    assert any(ONLY_GPU.match(name) for name in gpu)


@pytest.mark.parametrize("target", TARGETS)
def test_the_lock_has_all_that_the_project_asks_for(target: str) -> None:
    """Each dependency of the package and of its serving extras is locked."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["minilm"], *extras["serve"], *extras["tracing"]]
    names = {re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", one)[0]).lower() for one in wanted}
    assert names <= locked(target).keys()


def test_what_the_build_copies_is_sent_to_it() -> None:
    """.dockerignore lets through what a COPY names, and nothing that none does."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = {line[1:] for line in lines if line.startswith("!")}
    copied = set()
    for stage in ("build-cpu", "build-gpu", "runtime"):
        for keyword, rest in instructions(stage):
            if keyword == "COPY":
                copied |= set(rest.split()[:-1])
    assert {"k8s/image/*.lock" if name.endswith(".lock") else name for name in copied} == let_through
    assert all((ROOT / name).exists() for name in copied)
    assert "*" in lines


@pytest.mark.nightly
@pytest.mark.timeout(1_200)
def test_the_build_of_the_cpu_image_runs(tmp_path: Path) -> None:
    """The commands of its stages, in a folder instead of an image: everything is found by its hash, fits together, and
    the application imports and names its version, with bytecode that is there already."""
    source, target = tmp_path / "src", tmp_path / "opt" / "tokenalign"
    source.mkdir()

    def here(words: str) -> str:
        return words.replace("/opt/tokenalign", str(target)).replace("/src", str(source))

    environment = {key: value for key, value in os.environ.items() if not key.startswith("VIRTUAL_ENV")}
    environment |= {"SOURCE_DATE_EPOCH": "0"}
    for keyword, rest in [*instructions("build"), *instructions("build-cpu")]:
        if keyword == "RUN":
            subprocess.run(["/bin/bash", "-euc", here(rest)], check=True, cwd=source, env=environment)
        elif keyword == "COPY":
            *names, into = rest.split()
            subprocess.run(["/bin/cp", "-r", *names, here(into)], check=True, cwd=ROOT)
    run = [str(target / "bin" / "python")]
    subprocess.run([*run, "-m", "pip", "check"], check=True)
    says = subprocess.run(
        [*run, "-c", "import torch, ray, deploy.app, tokenalign; print(torch.__version__, ray.__version__)"],
        check=True, capture_output=True, text=True, cwd=tmp_path, env=environment | {"PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    lock = locked("cpu")
    assert says.stdout.split() == [lock["torch"], lock["ray"]]
    assert list(target.glob("lib/python3.*/site-packages/deploy/__pycache__/app.*.pyc"))
    subprocess.run([target / "bin" / "tokenalign-deploy", "--help"], check=True, capture_output=True)
