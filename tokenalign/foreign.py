"""Heads that another program wrote: brought to our names, or refused with a list of what is missing.

What names and shapes can't show is taken from no default: it is stated in the foreign configuration, or the user gives
it with `ForeignOverrides`, or the head is refused. The architecture is the card's; only names and layout may differ.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

from tokenalign.config import ModelConfig
from tokenalign.errors import CheckpointError, ConfigError
from tokenalign.foreign_config import MISSING_MEANS, ConfigReading, flatten, read_config
from tokenalign.foreign_tensors import TensorReading, read_tensors, slot_dims

logger = logging.getLogger("tokenalign")


@dataclass(frozen=True, slots=True)
class ForeignOverrides:
    """The user's own word on a foreign head, stronger than any synonym.

    config: our configuration keys with their values, for example `{"heads": 4, "document_template": "{text}"}`; keys of
    the backbone dotted or nested, `{"backbone": {"reference": "owner/name", "revision": "…"}}`
    tensors: our tensor names with the foreign names to take them from, for example `{"log_scale": "log(scale)"}` for a
    scale that isn't a logarithm, `"attn.qkv.weight[0:256]"` for some rows, `"transpose(w)"` for a matrix `[in, out]`
    ignore: foreign tensors and configuration keys, or patterns like `scorer.*`, that scores can do without; `tensors`
    may still take rows of them
    """

    config: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ignore: object = self.ignore
        if not isinstance(ignore, tuple):  # a lone string would count as a pattern for each of its letters
            raise ConfigError(f"ignore must be a tuple of names, it is {ignore!r}; write ignore=('name',)")


@dataclass(frozen=True, slots=True, eq=False)
class ForeignHead:
    """A foreign head in our terms.

    tensors: our names -> fp32 tensors
    sources: our names -> what each was taken from; with the file's hash it determines the tensors
    """

    config: ModelConfig
    tensors: dict[str, Tensor]
    sources: dict[str, str]


def adopt(
    foreign: Mapping[str, Any], tensors: Mapping[str, Tensor], overrides: ForeignOverrides, folder: Path
) -> ForeignHead:
    """The head in our terms, or one `CheckpointError` that lists all that is missing, contradictory or left over.

    foreign: its parsed config.json; tensors: of its weights file; folder: where they lie
    Raises `ConfigError` for values that are understood and out of their bounds.
    """
    foreign = dict(foreign)
    own_notes = foreign.pop("provenance") if isinstance(foreign.get("provenance"), dict) else {}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    names = read_tensors(shapes, overrides.tensors, overrides.ignore)
    shapes_say = dict(names.widths)
    if not names.problems or names.blocks:
        shapes_say["blocks"] = names.blocks
    config = read_config(foreign, overrides.config, overrides.ignore, shapes_say, folder)
    problems = [
        *config.problems,
        *names.problems,
        *_without_fractions(names, tensors),
        *_idle_patterns(foreign, shapes, overrides.ignore),
    ]
    if problems or config.missing:
        raise CheckpointError(_refusal(folder, problems, config))

    sources = {slot: str(source) for slot, source in sorted(names.sources.items())}
    parsed = ModelConfig.parse(
        config.nested() | {"provenance": own_notes | {"foreign_config": _record(config, names, sources)}},
        f"{folder}, read as a head that another program wrote",
    )
    _log(folder, config, names, sources)
    taken = {slot: source.take(tensors, len(slot_dims(slot) or ())) for slot, source in names.sources.items()}
    return ForeignHead(parsed, taken, sources)


def _without_fractions(names: TensorReading, tensors: Mapping[str, Tensor]) -> list[str]:
    return [
        f"tensor {slot}: {source} is of {tensors[source.name].dtype}; only float weights are read, dequantise it first"
        for slot, source in names.sources.items()
        if not tensors[source.name].is_floating_point()
    ]


def _idle_patterns(foreign: Mapping[str, Any], shapes: Mapping[str, Any], ignore: tuple[str, ...]) -> list[str]:
    known = [*shapes, *(".".join(path) for path, _ in flatten(foreign))]
    return [
        f"ignore: {pattern!r} matches no tensor and no config key; correct or remove it"
        for pattern in ignore
        if not any(fnmatchcase(name, pattern) for name in known)
    ]


def _refusal(folder: Path, problems: list[str], config: ConfigReading) -> str:
    lines = [f"{folder} holds a head that another program wrote, and it is not clear how to read it:"]
    lines += [f"- config {key}: not stated ({MISSING_MEANS[key]})" for key in config.missing]
    lines += [f"- {problem}" for problem in problems]
    if config.missing:
        example = ", ".join(f'"{key}": …' for key in config.missing)
        lines.append(f"Supply these: overrides=ForeignOverrides(config={{{example}}})")
    if config.unused:
        told = ", ".join(f"{key} = {_short(value)}" for key, value in config.unused.items())
        lines.append(f"Config keys that were not understood: {told}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _record(config: ConfigReading, names: TensorReading, sources: dict[str, str]) -> dict[str, Any]:
    return {
        "unused": config.unused,
        "keys": config.sources,
        "confirmed": config.confirmed,
        "tensors": sources,
        "ignored": [*config.ignored, *names.ignored],
    }


def _log(folder: Path, config: ConfigReading, names: TensorReading, sources: dict[str, str]) -> None:
    for what, mapping in (("config keys", config.sources), ("tensors", sources)):
        logger.info("%s: %s taken from: %s", folder, what, ", ".join(f"{k} <- {v}" for k, v in mapping.items()))
    if not_understood := [key for key in config.unused if key not in config.ignored]:
        logger.warning(
            "%s: config keys not understood, kept in provenance.foreign_config: %s", folder, ", ".join(not_understood)
        )
    if ignored := [*config.ignored, *names.ignored]:
        logger.warning("%s: left out as asked for: %s", folder, ", ".join(ignored))
