"""A configuration that another program wrote, in our keys: by known synonyms, by the tensors' shapes, by overrides.

Keys are compared in snake case, a section's name in front of its keys: `{"backbone": {"model_id": …}}` and
`backbone_model_id` are the same. Sections that only group (`head`, `model`, …) may be there or not. Sections about
training or evaluation are not searched: a temperature of distillation is not the one that logits are divided by.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tokenalign.references import PACKAGE_PREFIX

SHAPE_KEYS = ("backbone_width", "width", "blocks", "ffn_width")
MISSING_MEANS = {
    "backbone.reference": "the encoder, a hub id, a folder or package:NAME",
    "backbone.revision": "the commit of the encoder, 40 hex digits",
    "heads": "attention heads of a block",
    "max_length": "tokens of a document or label, template included",
    "document_template": "what stood around a document in training, '{text}' for nothing",
    "label_template": "what stood around a description in training, '{label}' for nothing",
    "temperature": "what logits are divided by, 1.0 for nothing",
}
OUR_KEYS = ("name", "backbone.sha256", *MISSING_MEANS, *SHAPE_KEYS)

_NEUTRAL_SECTIONS = frozenset(
    {"head", "model", "config", "architecture", "alignment_head", "alignment", "tokenalign", "inference", "text"}
)
_SECTIONS = {
    "encoder": "backbone",
    "base_model": "backbone",
    "backbone_model": "backbone",
    "templates": "template",
    "prompt": "template",
    "prompts": "template",
}
_BACKBONES = ("backbone", "encoder", "base_model")


def _of_backbone(*suffixes: str) -> tuple[str, ...]:
    return tuple(f"{backbone}_{suffix}" for backbone in _BACKBONES for suffix in suffixes)


def _of_side(side: str, *words: str) -> dict[str, tuple[str, ...]]:
    return {
        f"{side}_{part}": tuple(name for word in words for name in (f"{word}_{part}", f"template_{word}_{part}"))
        for part in ("prefix", "suffix")
    } | {f"{side}_template": tuple(name for word in words for name in (f"{word}_template", f"template_{word}"))}


_SYNONYMS: dict[str, tuple[str, ...]] = {
    "name": ("name",),
    "backbone.reference": (
        *_BACKBONES,
        *_of_backbone("reference", "id", "name", "model", "model_id", "model_name", "repo_id", "path", "name_or_path"),
        "base_model_name_or_path",
    ),
    "backbone.revision": _of_backbone("revision", "commit", "commit_hash"),
    "backbone.sha256": _of_backbone("sha256", "weights_sha256"),
    "backbone_width": (
        *_of_backbone("width", "dim", "hidden_size", "hidden_dim"),
        *("input_dim", "input_size", "in_dim", "in_features", "d_in", "feature_dim"),
    ),
    "width": (
        *("width", "head_width", "head_hidden_size", "dim", "d_model", "model_dim", "projection_dim", "proj_dim"),
        *("embed_dim", "alignment_dim"),
    ),
    "blocks": (
        *("blocks", "num_blocks", "n_blocks", "head_blocks", "context_blocks", "contextual_blocks"),
        *("num_layers", "n_layers", "head_layers", "num_head_layers", "depth"),
    ),
    "heads": (
        *("heads", "num_heads", "n_heads", "n_head", "nhead", "attention_heads"),
        *("head_num_attention_heads", "head_heads"),
    ),
    "ffn_width": (
        *("ffn_width", "ffn_dim", "ffn_size", "ff_dim", "dim_feedforward", "feedforward_dim", "feed_forward_dim"),
        *("d_ff", "mlp_dim", "head_intermediate_size", "ffn_hidden_size", "ffn_hidden_dim"),
    ),
    "max_length": (
        *("max_length", "max_len", "max_seq_length", "max_seq_len", "max_sequence_length", "max_tokens"),
        *("max_document_length", "max_label_length", "tokenizer_max_length", "backbone_max_length"),
    ),
    **_of_side("document", "document", "doc", "text", "input", "message"),
    **_of_side("label", "label", "candidate", "category", "description"),
    "temperature": (
        *("temperature", "temperature_value", "calibration_temperature", "calibrated_temperature"),
        *("softmax_temperature", "logit_temperature", "calibration_temperature_value"),
    ),
}
_OURS = {synonym: key for key, synonyms in _SYNONYMS.items() for synonym in synonyms}

# What our maths has no choice in: a foreign head that states another value would give other scores, without an error.
_FIXED: tuple[tuple[tuple[str, ...], tuple[Any, ...]], ...] = (
    (("activation", "ffn_activation", "hidden_act", "activation_function"), ("gelu", "gelu_exact", "exact_gelu")),
    (("norm_eps", "layer_norm_eps", "layernorm_eps", "ln_eps"), (1e-5,)),
    (("pre_norm", "norm_first", "bidirectional", "normalize", "l2_normalize"), (True,)),
    (("post_norm", "causal", "attention_bias", "qkv_bias", "projection_bias"), (False,)),
    (("max_scale", "scale_max", "scale_cap", "max_logit_scale", "logit_scale_max"), (100,)),
)
_FIXED_VALUES = {name: values for names, values in _FIXED for name in names}

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}|%s")
_FIELDS = {
    "document": frozenset({"", "0", "text", "document", "doc", "message", "input", "sentence", "utterance"}),
    "label": frozenset({"", "0", "label", "category", "description", "candidate", "name", "intent", "class"}),
}
_OUR_FIELD = {"document": "{text}", "label": "{label}"}
_WORD_EDGE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[\s\-]+")


@dataclass(frozen=True, slots=True)
class _Statement:
    """A value that the foreign configuration gives, and the name of its key there."""

    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r}"


@dataclass(slots=True)
class ConfigReading:
    """What a foreign configuration says, in our keys.

    values: our keys, dotted, with their values; complete only where `problems` and `missing` are empty
    sources: our keys -> the foreign key, "override" or "shapes"
    confirmed: foreign keys that state what this head computes anyway
    unused: foreign keys that were not understood, with their values
    ignored: foreign keys left out at the user's word
    missing: our keys that nothing gives
    problems: contradictions and values that can't be read, each said once, so `faulty` holds the keys they are about
    """

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    confirmed: list[str] = field(default_factory=list)
    unused: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    faulty: set[str] = field(default_factory=set)

    def fault(self, key: str, problem: str) -> None:
        """Note a problem of one of our keys."""
        self.faulty.add(key)
        self.problems.append(f"config {key}: {problem}")

    def nested(self) -> dict[str, Any]:
        """`values` as `ModelConfig` takes them."""
        prefix = "backbone."
        backbone = {key.removeprefix(prefix): v for key, v in self.values.items() if key.startswith(prefix)}
        return {key: v for key, v in self.values.items() if not key.startswith(prefix)} | {"backbone": backbone}


def read_config(
    foreign: Mapping[str, Any],
    overrides: Mapping[str, Any],
    ignore: Iterable[str],
    shapes_say: Mapping[str, int],
    folder: Path,
) -> ConfigReading:
    """Our keys from a foreign configuration, and what is wrong or missing.

    overrides: our keys, dotted or nested; ignore: foreign keys or patterns; shapes_say: `SHAPE_KEYS` as far as known;
    folder: the head's own, in which a relative backbone folder is looked for
    """
    reading = ConfigReading()
    given = _checked_overrides(overrides, reading)
    statements = _templates(_statements(foreign, tuple(ignore), reading), given, reading)
    for key in OUR_KEYS:
        if key in SHAPE_KEYS:
            _settle_by_shape(key, statements[key], given, shapes_say, reading)
        else:
            _settle(key, statements[key], given, reading)
    _check_revision(given, folder, reading)
    _list_missing(folder, shapes_say, reading)
    return reading


def flatten(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path of keys, value) of every leaf; an empty section counts as a leaf."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value


def _checked_overrides(overrides: Mapping[str, Any], reading: ConfigReading) -> dict[str, Any]:
    given = {".".join(path): value for path, value in flatten(overrides)}
    for key in [key for key in given if key not in OUR_KEYS]:
        del given[key]
        reading.problems.append(f"override of config {key!r}: not a key of ours; these are: {', '.join(OUR_KEYS)}")
    return given


def _statements(
    foreign: Mapping[str, Any], ignore: tuple[str, ...], reading: ConfigReading
) -> dict[str, list[_Statement]]:
    statements: dict[str, list[_Statement]] = defaultdict(list)
    for path, value in flatten(foreign):
        dotted = ".".join(path)
        if any(fnmatchcase(dotted, pattern) for pattern in ignore):
            reading.ignored.append(dotted)
            reading.unused[dotted] = value
            continue
        names = _names(path)
        fixed = next((name for name in names if name in _FIXED_VALUES), None)
        ours = next((_OURS[name] for name in names if name in _OURS), None)
        if (fixed or ours) and value in (None, {}):
            continue  # states nothing
        if fixed is not None:
            _check_fixed(_Statement(dotted, value), _FIXED_VALUES[fixed], reading)
        elif ours is not None:
            statements[ours].append(_Statement(dotted, value))
        else:
            reading.unused[dotted] = value
    return statements


def _names(path: tuple[str, ...]) -> tuple[str, ...]:
    """The names under which a key is looked up: with all of its sections, then without those that only group."""
    *sections, leaf = [_WORD_EDGE.sub("_", part).lower() for part in path]
    sections = [_SECTIONS.get(section, section) for section in sections]
    telling = [section for section in sections if section not in _NEUTRAL_SECTIONS]
    return "_".join([*sections, leaf]), "_".join([*telling, leaf])


def _check_fixed(statement: _Statement, accepted: tuple[Any, ...], reading: ConfigReading) -> None:
    value = statement.value.lower() if isinstance(statement.value, str) else statement.value
    if value in accepted:
        reading.confirmed.append(statement.key)
    else:
        reading.problems.append(
            f"config {statement}: this head computes with {accepted[0]!r}; its scores would differ from its author's, "
            f'and ignore=("{statement.key}",) accepts that'
        )


def _templates(
    statements: dict[str, list[_Statement]], given: Mapping[str, Any], reading: ConfigReading
) -> dict[str, list[_Statement]]:
    """The statements, with templates and prefixes brought to templates of ours."""
    for side, our_field in _OUR_FIELD.items():
        key = f"{side}_template"
        whole, parts = statements.pop(key, []), [statements.pop(f"{side}_{part}", []) for part in ("prefix", "suffix")]
        if key in given:
            continue
        prefixes, suffixes = ([s for s in part if s.value or not whole] for part in parts)  # "" beside a template: none
        try:
            statements[key] = [_Statement(s.key, _our_template(s, side)) for s in whole]
            statements[key] += _affixed(prefixes, suffixes, our_field)
        except ValueError as error:
            reading.fault(key, f"{error}; give it with config={{{key!r}: '…'}}")
    return statements


def _affixed(prefixes: list[_Statement], suffixes: list[_Statement], our_field: str) -> list[_Statement]:
    """A template for every prefix with every suffix, so that contradictions among them stay visible."""
    for statement in (*prefixes, *suffixes):
        if not isinstance(statement.value, str):
            raise ValueError(f"{statement} is no string")  # noqa: TRY004  # a value of a file, not of a caller
    nothing = [_Statement("", "")]
    return [
        _Statement(" and ".join(s.key for s in (prefix, suffix) if s.key), f"{prefix.value}{our_field}{suffix.value}")
        for prefix in prefixes or nothing
        for suffix in suffixes or nothing
        if prefix.key or suffix.key
    ]


def _our_template(statement: _Statement, side: str) -> str:
    template = statement.value
    if not isinstance(template, str):
        raise ValueError(f"{statement} is no string")  # noqa: TRY004  # a value of a file, not of a caller
    found = list(_PLACEHOLDER.finditer(template))
    if len(found) != 1 or "{{" in template or "}}" in template:
        raise ValueError(f"{statement} needs exactly one placeholder like {_OUR_FIELD[side]}")
    name = (found[0][1] or "").strip().lower().removesuffix(" with spaces")
    if name not in _FIELDS[side]:
        raise ValueError(f"{statement} has the placeholder {found[0][0]}, not known to stand for the {side}")
    return template[: found[0].start()] + _OUR_FIELD[side] + template[found[0].end() :]


def _settle(key: str, statements: list[_Statement], given: Mapping[str, Any], reading: ConfigReading) -> None:
    if key in given:
        reading.values[key], reading.sources[key] = given[key], "override"
    elif any(statement.value != statements[0].value for statement in statements):
        reading.fault(key, f"{' but '.join(map(str, statements))}; say which with config={{{key!r}: …}}")
    elif statements:
        reading.values[key] = statements[0].value
        reading.sources[key] = ", ".join(statement.key for statement in statements)


def _settle_by_shape(
    key: str,
    statements: list[_Statement],
    given: Mapping[str, Any],
    shapes_say: Mapping[str, int],
    reading: ConfigReading,
) -> None:
    stated = [_Statement("override", given[key])] if key in given else statements
    if key in shapes_say:
        reading.values[key], reading.sources[key] = shapes_say[key], "shapes"
        for statement in stated:
            if statement.value != shapes_say[key]:
                reading.fault(
                    key,
                    f"{statement}, but the tensors' shapes say {shapes_say[key]}; if that key means something else, "
                    f"say config={{{key!r}: {shapes_say[key]}}}",
                )


def _check_revision(given: Mapping[str, Any], folder: Path, reading: ConfigReading) -> None:
    """A hub id may carry its commit behind an `@`, and a commit is of the encoder that it was stated with."""
    values = reading.values
    reference = values.get("backbone.reference")
    if not isinstance(reference, str):
        return
    if "backbone.reference" in given and "backbone.revision" not in given:
        values.pop("backbone.revision", None)
        reading.sources.pop("backbone.revision", None)
    if _is_hub_id(reference, folder) and "@" in reference:
        values["backbone.reference"], _, commit = reference.partition("@")
        if values.setdefault("backbone.revision", commit) != commit:
            reading.fault(
                "backbone.revision",
                f"{values['backbone.revision']!r}, but the backbone is {reference!r}; "
                "say which with config={'backbone.revision': …}",
            )
        reading.sources.setdefault("backbone.revision", reading.sources["backbone.reference"])


def _is_hub_id(reference: str, folder: Path) -> bool:
    if reference.startswith((PACKAGE_PREFIX, ".", "/", "~")) or reference.count("/") != 1:
        return False
    return not (folder / reference).is_dir() and not Path(reference).is_dir()


def _list_missing(folder: Path, shapes_say: Mapping[str, int], reading: ConfigReading) -> None:
    values = reading.values
    if shapes_say.get("blocks") == 0:
        values.setdefault("heads", 1)  # nothing attends
    reference = values.get("backbone.reference")
    reading.missing = [key for key in MISSING_MEANS if key not in values and key not in reading.faulty]
    if isinstance(reference, str) and not _is_hub_id(reference, folder) and "backbone.revision" in reading.missing:
        reading.missing.remove("backbone.revision")
