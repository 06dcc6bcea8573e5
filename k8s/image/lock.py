"""Writes cpu.lock or gpu.lock beside it: each package of the image by version and hash.

`python k8s/image/lock.py cpu`, with the Python version and platform of the image (3.11, Linux on x86-64) and with the
pip settings of whoever builds it: versions are those of constraints.txt, pip chooses the files, and the lock says which
ones they were. cpu wants the build of torch without CUDA, `+cpu` in its version, which PyTorch keeps in its own index.
"""

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

IMAGE = Path(__file__).resolve().parent
PROJECT = IMAGE.parents[1]
EXTRAS = ("minilm", "serve", "tracing")
TORCH = {"cpu": "torch=={}+cpu", "gpu": "torch=={}"}


def main(arguments: Sequence[str] | None = None) -> int:
    """0 once the lock is written; pip's own status when it found no solution."""
    parser = argparse.ArgumentParser(description="Lock the packages of the image by hash.")
    parser.add_argument("target", choices=sorted(TORCH))
    target = parser.parse_args(arguments).target
    constraints = (PROJECT / "constraints.txt").read_text(encoding="utf-8")
    done = subprocess.run(pip_command(requirements(target, constraints)), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return done.returncode
    lines = lock_lines(json.loads(done.stdout))
    header = f"# Made by `python k8s/image/lock.py {target}` for Python 3.11 on Linux, x86-64.\n"
    (IMAGE / f"{target}.lock").write_text(header + "".join(lines), encoding="utf-8")
    print(f"{len(lines)} packages in {target}.lock")
    return 0


def requirements(target: str, constraints: str) -> list[str]:
    """What the project asks for with its extras, and torch in the build of the target."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted: list[str] = [*project["dependencies"]]
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    version = re.search(r"^torch==([\w.]+)", constraints, flags=re.MULTILINE)
    if version is None:
        raise SystemExit("constraints.txt has no line for torch; add torch==VERSION")
    return [*wanted, TORCH[target].format(version[1]), "setuptools>=77"]  # the last one builds the project itself


def pip_command(wanted: Sequence[str]) -> list[str]:
    """pip, asked what it would install."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    return [*command, "--only-binary", ":all:", "--constraint", str(PROJECT / "constraints.txt"), *wanted]


def lock_lines(report: dict[str, Any]) -> list[str]:
    """A line for each package of pip's report, by name."""
    lines = []
    for item in report["install"]:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name}=={item['metadata']['version']} --hash=sha256:{digest}\n")
    return sorted(lines)


if __name__ == "__main__":
    sys.exit(main())
