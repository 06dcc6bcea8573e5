"""Writes each overlay's serve_config.yaml: the project's own, changed by base, components and overlay.

`python k8s/generate.py` writes them; `--check` changes nothing and ends with 1 when one is out of date.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

K8S = Path(__file__).resolve().parent
CHANGES = "serve_changes.yaml"
HEADER = "# Made by `python k8s/generate.py` from serve_config.yaml and the serve_changes.yaml files; change those.\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every file is as it should be, 1 when --check found one that is not."""
    parser = argparse.ArgumentParser(description="Write the overlays' serve_config.yaml.")
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 when a file is out of date")
    check = parser.parse_args(arguments).check
    stale = []
    for overlay in overlays(K8S):
        path, text = overlay / "serve_config.yaml", generated(overlay, K8S.parent / "serve_config.yaml")
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if not check:
            path.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(K8S.parent)}: {'out of date; run python k8s/generate.py' if check else 'written'}")
    return 1 if check and stale else 0


def overlays(k8s: Path) -> list[Path]:
    """The folders below k8s/overlays, in order."""
    return sorted(path.parent for path in k8s.glob("overlays/*/kustomization.yaml"))


def generated(overlay: Path, project: Path) -> str:
    """The text of an overlay's serve_config.yaml."""
    config = yaml.safe_load(project.read_text(encoding="utf-8"))
    for changes in changes_of(overlay):
        config = merge(config, yaml.safe_load(changes.read_text(encoding="utf-8")))
    return HEADER + yaml.safe_dump(config, sort_keys=False, width=120)


def changes_of(overlay: Path) -> Iterator[Path]:
    """The files of changes that are in force in an overlay, the last one the strongest."""
    kustomization = yaml.safe_load((overlay / "kustomization.yaml").read_text(encoding="utf-8"))
    for folder in (*kustomization["resources"], *kustomization.get("components", ())):
        if (path := (overlay / folder / CHANGES).resolve()).exists():
            yield path
    yield overlay / CHANGES


def merge(old: Any, new: Any) -> Any:
    """`new` laid over `old`: mappings by key, where null takes the key away, and lists of named mappings by name."""
    if isinstance(old, dict) and isinstance(new, dict):
        merged = {key: merge(value, new[key]) if key in new else value for key, value in old.items()}
        merged |= {key: value for key, value in new.items() if key not in old}
        return {key: value for key, value in merged.items() if not (key in new and new[key] is None)}
    if names(old) and names(new):
        changes = {item["name"]: item for item in new}
        if unknown := changes.keys() - {item["name"] for item in old}:
            raise ValueError(f"{', '.join(sorted(unknown))}: named in the changes but not in serve_config.yaml")
        return [merge(item, changes[item["name"]]) if item["name"] in changes else item for item in old]
    return new


def names(value: Any) -> bool:
    """Whether it is a list of mappings that have names."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and "name" in item for item in value)


if __name__ == "__main__":
    sys.exit(main())
