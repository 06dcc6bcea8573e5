"""Refuses rendered manifests that still hold placeholders: `kubectl kustomize k8s/overlays/gpu | python k8s/check.py`.

It ends with 0 and says how many images there are, or with 1 and one line for each thing that is left to fill in.
"""

import re
import sys
from collections.abc import Iterator
from typing import Any

import yaml

PLACEHOLDER_HOST = ".invalid/"
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
NO_DIGEST = "0" * 64


def main() -> int:
    """The exit status for the manifests on standard input."""
    documents = [document for document in yaml.safe_load_all(sys.stdin) if document]
    images = list(images_of(documents))
    problems = [f"{where}: {problem}" for where, image in images for problem in problems_of(image)]
    for problem in sorted(set(problems)):
        print(problem)
    if not images:
        print("no image was found; pipe the output of kubectl kustomize into this")
    elif not problems:
        print(f"{len(images)} images, each by its digest")
    return 1 if problems or not images else 0


def images_of(documents: list[Any]) -> Iterator[tuple[str, str]]:
    """(kind/name, image) of every container, wherever it stands in a document."""
    for document in documents:
        where = f"{document['kind']}/{document['metadata']['name']}"
        for image in _images(document):
            yield where, image


def _images(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _images(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in ("containers", "initContainers"):
                yield from (str(container.get("image", "")) for container in item)
            yield from _images(item)


def problems_of(image: str) -> Iterator[str]:
    """What keeps an image from being the one that was built and looked at."""
    if PLACEHOLDER_HOST in image:
        yield f"{image} has a placeholder for its registry; set newName under `images:` of the overlay"
    if image.endswith(NO_DIGEST):
        yield f"{image} has a placeholder for its digest; set digest under `images:` of the overlay"
    elif not DIGEST.search(image):
        yield f"{image or 'a container without an image'} has no digest, so it may change; set one under `images:`"


if __name__ == "__main__":
    sys.exit(main())
