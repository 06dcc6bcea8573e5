"""`config.json` of a linear head: its labels, how texts are read and pooled, and how logits become labels."""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tokenalign.config import (
    CONFIG_FILE,
    SCHEMA_VERSION,
    BackboneReference,
    ModelConfig,
    describe_validation,
    read_json,
)
from tokenalign.errors import ConfigError, InputError
from tokenalign.labels import LabelSet
from tokenalign.text import DEFAULT_MAX_WINDOWS

KIND: Literal["linear"] = "linear"
WINDOW, STRIDE = 256, 128  # tokens; the Qwen3.5 cards' protocol
THRESHOLD_STEP = 0.05

Mode = Literal["single_label", "multi_label"]
Pooling = Literal["last", "mean"]


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ThresholdChoice(_Frozen):
    """The probability from which on a label is given, and how sure that choice is.

    texts: of the calibration split that it was chosen on
    low, high: what the middle 90 % of bootstrap resamples of those texts choose; lowest, highest: what any does
    """

    threshold: float = Field(gt=0, lt=1)
    texts: int = Field(ge=1)
    resamples: int = Field(ge=1)
    low: float = Field(gt=0, lt=1)
    high: float = Field(gt=0, lt=1)
    lowest: float = Field(gt=0, lt=1)
    highest: float = Field(gt=0, lt=1)

    @property
    def stable(self) -> bool:
        """Whether the middle 90 % of resamples choose this threshold or one of its two neighbours."""
        step = THRESHOLD_STEP + 1e-6
        return self.low >= self.threshold - step and self.high <= self.threshold + step

    @property
    def spread(self) -> str:
        """What resampling chose, in words."""
        return (
            f"{self.lowest:.2f} to {self.highest:.2f} in {self.resamples} resamples of the {self.texts:,} calibration "
            f"texts, 90 % of them {self.low:.2f} to {self.high:.2f}"
        )

    @property
    def warning(self) -> str | None:
        """What to tell whoever relies on the threshold; None where it is stable."""
        if self.stable:
            return None
        return (
            f"{self.threshold:.2f} is unstable: {self.spread}; choose it anew on texts of your own, for the precision "
            "and recall that you need"
        )


class LinearConfig(_Frozen):
    """The frozen configuration of one linear head on one backbone.

    backbone_width: D, width of the encoder's token states
    labels: the names of the head's rows, in order
    mode: "single_label", a softmax over the labels, or "multi_label", a sigmoid of each
    pooling: of a window's token states, "last" or "mean"
    window, stride: tokens that are read at a time, special ones included, and from one window to the next
    max_windows: of one text; a longer one is refused
    temperature: logits are divided by it before the softmax; 1 for "multi_label"
    threshold: of "multi_label" alone
    provenance: how the head was made; free-form, kept as it is
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    kind: Literal["linear"] = KIND
    name: str = Field(default="linear", min_length=1, max_length=200)
    backbone: BackboneReference
    backbone_width: int = Field(ge=1, le=65_536)
    labels: tuple[str, ...]
    mode: Mode
    pooling: Pooling
    window: int = Field(default=WINDOW, ge=4, le=32_768)
    stride: int = Field(default=STRIDE, ge=1)
    max_windows: int = Field(default=DEFAULT_MAX_WINDOWS, ge=1)
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    threshold: ThresholdChoice | None = None
    provenance: dict[str, Any] = Field(default_factory=dict)

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return LabelSet.of(labels, min_labels=1).names
        except InputError as error:
            raise ValueError(error.message) from error

    @model_validator(mode="after")
    def _check_mode(self) -> "LinearConfig":
        if self.mode == "single_label" and len(self.labels) < 2:
            raise ValueError('labels: a head of mode "single_label" needs at least 2; there is 1')
        if (self.mode == "multi_label") != (self.threshold is not None):
            raise ValueError(f'threshold: a head of mode "{self.mode}" has {"none" if self.threshold else "one"}')
        if self.mode == "multi_label" and self.temperature != 1.0:
            raise ValueError(f'temperature: is {self.temperature}; only "single_label" has one other than 1')
        if self.stride > self.window:
            raise ValueError(f"stride: {self.stride} leaves gaps between windows of {self.window}; lower it")
        return self

    @classmethod
    def parse(cls, values: Any, source: str = "config") -> "LinearConfig":
        """The validated configuration; `ConfigError` names every key at fault and where it stood."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"{source}: {describe_validation(error)}") from error

    @classmethod
    def load(cls, path: Path) -> "LinearConfig":
        """The configuration in the file at `path`; `ConfigError` for that of an alignment head too."""
        values = read_json(path)
        if not isinstance(values, dict) or values.get("kind") != KIND:
            raise ConfigError(f"{path} is no linear head's; load an alignment head with TokenAlignClassifier")
        return cls.parse(values, str(path))

    def save(self, path: Path) -> None:
        """Write it as JSON that `load` reads back equal."""
        path.write_text(json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def with_backbone(self, reference: str) -> "LinearConfig":
        """The same configuration with its encoder taken from elsewhere; an expected sha256 stays in force."""
        backbone = {"reference": reference, "sha256": self.backbone.sha256}
        return self.parse(self.model_dump() | {"backbone": backbone}, "backbone given for this head")

    @property
    def encoder(self) -> ModelConfig:
        """What the encoder and its tokenizer are loaded with: a window is their longest text."""
        return ModelConfig(
            name=self.name, backbone=self.backbone, backbone_width=self.backbone_width, max_length=self.window
        )


def is_linear(folder: Path) -> bool:
    """Whether the head in `folder` says that it is a linear one; False where there is no head."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return False
    values = read_json(path)
    return isinstance(values, dict) and values.get("kind") == KIND
