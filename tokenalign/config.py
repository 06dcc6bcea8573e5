"""`config.json` of a head: everything that its answers depend on besides the weights."""

import json
import unicodedata
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from tokenalign.errors import ConfigError

CONFIG_FILE = "config.json"
SCHEMA_VERSION: Literal[1] = 1
TEXT_RULES_VERSION = 1  # raise it when text.py keeps, cuts or cleans differently: cached label rows depend on it
UNICODE_VERSION = unicodedata.unidata_version


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BackboneReference(_Frozen):
    """Where the frozen encoder comes from, and what its weights must hash to.

    reference: a hub id ("Qwen/Qwen3-1.7B"), a local folder, or `package:NAME` for a model that a Python package ships
    revision: the hub commit, 40 hex digits; only for a hub id, and needed there
    sha256: of model.safetensors (of the index file for sharded weights); None leaves it unchecked
    """

    reference: str = Field(min_length=1)
    revision: str | None = Field(default=None, pattern=r"^[0-9a-f]{40}$")
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")


class MultiLabelCalibration(_Frozen):
    """How a logit, as answers give it, becomes the probability that its label holds: sigmoid(scale · logit + bias).

    Source: Platt, 1999, eq. 1, one label against the rest, the same two numbers for all labels. `scale` is positive, so
    that the order of the labels stays that of their logits.
    """

    scale: float = Field(gt=0, allow_inf_nan=False)
    bias: float = Field(allow_inf_nan=False)


class AbstentionCalibration(_Frozen):
    """The least best score of a text that has one of the labels; applied where `min_score` is "calibrated".

    kept: the share of the texts that it was fitted on which reach it; labels: candidates that these had, on which a
    softmax score depends
    min_score: of the softmax over the candidates; multi_label_min_score: of independent scores, None without them
    """

    kept: float = Field(gt=0, lt=1)
    labels: int = Field(ge=1)
    min_score: float = Field(ge=0, le=1)
    multi_label_min_score: float | None = Field(default=None, ge=0, le=1)


def _template_with(field: str) -> Any:
    def check(template: str) -> str:
        if template.count("{" + field + "}") != 1:
            raise ValueError(
                f"must hold {{{field}}} exactly once, like 'The topic is {{{field}}}.'; it is {template!r}"
            )
        return template

    return AfterValidator(check)


class ModelConfig(_Frozen):
    """The frozen configuration of one head on one backbone.

    backbone_width: D, width of the encoder's token states
    width, blocks, heads, ffn_width: of the alignment head
    max_length: tokens of a document or a label, template and special tokens included
    temperature: logits are divided by it; fitted on validation data after training
    multi_label: makes independent probabilities of logits; fitted likewise, None where it was not
    abstention: the score below which a caller may ask for no label; fitted likewise
    label_template: boilerplate around a description; context for its tokens, never scored
    provenance: how the head was made; free-form, kept as it is
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    name: str = Field(default="tokenalign", min_length=1, max_length=200)
    backbone: BackboneReference
    backbone_width: int = Field(ge=1, le=65_536)
    width: int = Field(default=256, ge=1, le=8_192)
    blocks: int = Field(default=2, ge=0, le=64)
    heads: int = Field(default=4, ge=1, le=256)
    ffn_width: int = Field(default=1024, ge=1, le=65_536)
    max_length: int = Field(default=128, ge=4, le=32_768)
    document_template: Annotated[str, _template_with("text")] = "{text}"
    label_template: Annotated[str, _template_with("label")] = "{label}"
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    multi_label: MultiLabelCalibration | None = None
    abstention: AbstentionCalibration | None = None
    provenance: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_heads(self) -> "ModelConfig":
        if self.width % self.heads:
            raise ValueError(f"heads: width {self.width} can't be divided among {self.heads} heads; choose a divisor")
        return self

    @classmethod
    def parse(cls, values: Any, source: str = "config") -> "ModelConfig":
        """The validated configuration; `ConfigError` names every key at fault and where it stood."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"{source}: {describe_validation(error)}") from error

    @classmethod
    def load(cls, path: Path) -> "ModelConfig":
        """The configuration in the file at `path`."""
        return cls.parse(read_json(path), str(path))

    def with_backbone(self, reference: str) -> "ModelConfig":
        """The same configuration with its encoder taken from elsewhere; an expected sha256 stays in force."""
        backbone = {"reference": reference, "sha256": self.backbone.sha256}
        return self.parse(self.model_dump() | {"backbone": backbone}, "backbone given for this head")

    def save(self, path: Path) -> None:
        """Write it as JSON that `load` reads back equal."""
        path.write_text(json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """The parsed JSON file; `ConfigError` says what is wrong with it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} does not exist; a model folder holds config.json and model.safetensors") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as JSON: {error}") from error


def describe_validation(error: ValidationError) -> str:
    """One line that names every key at fault, its value's problem and, for an unknown key, that it is unknown."""
    parts = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"]) or "(whole)"
        problem = "unknown key; remove it or check its spelling" if item["type"] == "extra_forbidden" else item["msg"]
        parts.append(f"{key}: {problem.removeprefix('Value error, ')}")
    return "; ".join(parts)


def fingerprint_of(parts: dict[str, Any]) -> str:
    """The hex sha256 over named parts, each JSON-encodable; a changed name or value gives another one."""
    return sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
