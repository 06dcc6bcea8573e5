"""The report: one JSON file of all that was measured, and from it a page and plots."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tests.benchmarks.machine import Machine
from tests.benchmarks.reporting import Target, target_table

NAME = "performance"


@dataclass(frozen=True, slots=True)
class Measured:
    """What one part gave: its result, or why there is none, and where and when."""

    machine: Machine
    seconds: float
    command: str
    texts: str
    result: Any = None
    failure: str = ""


def to_json(measured: Mapping[str, Measured]) -> str:
    """All parts; a number that isn't one (NaN) is null."""
    values = {name: asdict(part) for name, part in measured.items()}
    return json.dumps(_without_nan(values), indent=1, allow_nan=False) + "\n"


def from_json(text: str, parts: Mapping[str, ModuleType]) -> dict[str, Measured]:
    """The parts of a report that the suite still has, in the suite's order; one that kept other things is left out."""
    values = json.loads(text)
    found = {}
    for name, module in parts.items():
        if name in values:
            try:
                part = TypeAdapter(Measured).validate_python(values[name])
                result = part.result and TypeAdapter(module.Result).validate_python(part.result)
            except ValidationError:
                continue
            found[name] = Measured(part.machine, part.seconds, part.command, part.texts, result, part.failure)
    return found


def all_targets(measured: Mapping[str, Measured], parts: Mapping[str, ModuleType]) -> list[Target]:
    """The targets of every part that has a result."""
    return [t for name, part in measured.items() if part.result is not None for t in parts[name].targets(part.result)]


def page(measured: Mapping[str, Measured], parts: Mapping[str, ModuleType], command: str) -> str:
    """The report in Markdown."""
    texts = [
        "# Performance",
        f"Made by `{command}`. Ratios of things that were measured in turn in one run: read those, not the times. "
        "Medians of repeats; the spread is the largest less the smallest repeat, relative to the median. Texts are "
        "distinct until they come round.",
        "## Targets",
        target_table(all_targets(measured, parts)),
        "## Where and when",
        *_places(measured, parts),
    ]
    for name, part in measured.items():
        texts.append(f"## {parts[name].TITLE}")
        texts.append(parts[name].section(part.result) if part.result is not None else f"Not measured: {part.failure}")
    return "\n\n".join(texts) + "\n"


def write(folder: Path, measured: Mapping[str, Measured], parts: Mapping[str, ModuleType], command: str) -> None:
    """The JSON, the page and the plots, all in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{NAME}.json").write_text(to_json(measured), encoding="utf-8")
    text = page(measured, parts, command)
    for name, part in measured.items():
        if part.result is None:
            continue
        for file, picture in parts[name].plots(part.result).items():
            (folder / f"{NAME}-{file}").write_text(picture, encoding="utf-8")
            text = text.replace(f"]({file})", f"]({NAME}-{file})")
    (folder / f"{NAME}.md").write_text(text, encoding="utf-8")


def _places(measured: Mapping[str, Measured], parts: Mapping[str, ModuleType]) -> Sequence[str]:
    """Each machine once, with the parts that ran on it."""
    found: dict[str, list[str]] = {}
    for name, part in measured.items():
        line = f"{parts[name].TITLE}: {part.machine.date}, commit {part.machine.commit_described}, {part.seconds:.0f} s"
        found.setdefault(f"{part.machine.described} Texts: {part.texts}.", []).append(line)
    return [f"{machine}\n\n" + "\n".join(f"- {line}" for line in lines) for machine, lines in found.items()]


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
