"""A whole run of a linear head: from options to a folder with the head, its history, its hashes and its figures."""

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tokenalign.backbone import DType
from tokenalign.config import BackboneReference, ModelConfig
from tokenalign.evaluation import FloatArray, evaluate
from tokenalign.linear.config import STRIDE, WINDOW, LinearConfig, Mode, Pooling
from tokenalign.linear.head import independent_probabilities, probabilities
from tokenalign.linear.pooling import natural_pooling
from tokenalign.linear.reading import Reading
from tokenalign.linear.weights import save_linear
from tokenalign.text import TextTokenizer
from tokenalign.training.calibration import fit_temperature
from tokenalign.training.encoder import MINILM, load_encoder
from tokenalign.training.labelled_data import LabelledFiles, read_labelled
from tokenalign.training.linear_trainer import (
    LinearRecipe,
    LinearTrained,
    OnLinearEpoch,
    Pooled,
    text_logits,
    train_linear,
)
from tokenalign.training.linear_vectors import OnVectors, text_vectors
from tokenalign.training.multi_label_figures import multi_label_figures
from tokenalign.training.run import HISTORY_FILE, PARTITIONS_FILE, check_output
from tokenalign.training.stratified import (
    CALIBRATION,
    TEST,
    TRAIN,
    VALIDATION,
    StratifiedSplit,
    describe_stratified,
    make_stratified_split,
)
from tokenalign.training.threshold import choose_threshold

EVALUATION_FILE = "evaluation.json"

OnStratified = Callable[[StratifiedSplit, tuple[str, ...], Mapping[str, Pooled]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRunOptions:
    """What to train, on what, and where to.

    output: a folder that is empty or absent; feature_dir: where vectors are kept, runs share it
    window, stride: tokens; pooling: None for what suits the encoder
    """

    files: LabelledFiles
    output: Path
    feature_dir: Path
    name: str
    recipe: LinearRecipe = field(default_factory=LinearRecipe)
    seed: int = 42
    window: int = WINDOW
    stride: int = STRIDE
    pooling: Pooling | None = None
    backbone: BackboneReference = MINILM
    device: str = "auto"
    dtype: DType = "auto"
    cache_dir: str | Path | None = None
    local_only: bool = False


def run_linear_training(
    options: LinearRunOptions,
    *,
    on_split: OnStratified | None = None,
    on_vectors: OnVectors | None = None,
    on_epoch: OnLinearEpoch | None = None,
) -> tuple[LinearConfig, dict[str, Any]]:
    """(configuration of the head that now lies in `options.output`, its figures on the test partition).

    The folder holds config.json, model.safetensors, history.json, partitions.json and evaluation.json. Raises
    `TrainingError` where the folder is in use, `DataError` where the data isn't what it should be.
    """
    check_output(options.output, resume=False)
    data = read_labelled(options.files)  # before the encoder is loaded, which takes seconds
    split = make_stratified_split(data, options.seed)
    encoder = load_encoder(
        options.backbone,
        name=options.name,
        label_template="{label}",
        device=options.device,
        dtype=options.dtype,
        cache_dir=options.cache_dir,
        local_files_only=options.local_only,
    )
    reading = Reading(options.pooling or natural_pooling(encoder.backbone), options.window, options.stride)
    windowed = ModelConfig.parse(encoder.config.model_dump() | {"max_length": options.window}, "options")
    tokenizer = TextTokenizer.load(encoder.folder, windowed)
    vectors = {
        what: text_vectors(encoder.backbone, tokenizer, reading, texts, options.feature_dir, what, on_vectors)
        for what, texts in (("data", data.texts), ("test data", data.test))
        if texts is not None
    }
    partitions = {
        name: vectors["test data" if name == TEST and data.test is not None else "data"].pooled(part, data.labels)
        for name, part in split.partitions.items()
    }
    if on_split is not None:
        on_split(split, data.labels, partitions)
    trained = train_linear(
        options.recipe, data.mode, options.seed, partitions[TRAIN], partitions[VALIDATION], on_epoch=on_epoch
    )
    provenance: dict[str, Any] = {
        "recipe": asdict(options.recipe),
        "seed": options.seed,
        "data": data.provenance,
        "split": describe_stratified(split),
        "backbone": asdict(encoder.backbone.identity),
        "tokenizer_sha256": tokenizer.digest,
        "device": encoder.backbone.device.type,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("tokenalign", "torch", "transformers", "tokenizers", "numpy")},
        },
        "training": {"best_epoch": trained.best_epoch, "epochs": len(trained.history)},
    }
    final = LinearConfig.parse(
        {
            "name": encoder.config.name,
            "backbone": encoder.config.backbone.model_dump(),
            "backbone_width": encoder.config.backbone_width,
            "labels": data.labels,
            "mode": data.mode,
            **asdict(reading),
            **_fitted(data.mode, text_logits(trained.head, partitions[CALIBRATION]), partitions[CALIBRATION]),
            "provenance": provenance,
        },
        "options",
    )
    figures = linear_figures(final, text_logits(trained.head, partitions[TEST]), partitions[TEST].holds)
    _save(options.output, final, trained, split, figures)
    return final, figures


def linear_figures(config: LinearConfig, logits: FloatArray, holds: NDArray[np.bool_]) -> dict[str, Any]:
    """All figures of `[texts, labels]` logits as JSON has them: `Metrics` or `MultiLabelFigures` by the head's mode."""
    scores = probabilities(logits, config)
    if config.threshold is None:
        return evaluate(scores, holds.argmax(axis=1), config.labels).as_dict()
    return multi_label_figures(scores, holds, config.threshold.threshold, config.labels).as_dict()


def _fitted(mode: Mode, logits: FloatArray, calibration: Pooled) -> dict[str, Any]:
    """What is fitted on the calibration partition: the temperature, or the threshold."""
    if mode == "single_label":
        return {"temperature": fit_temperature(logits, calibration.holds.argmax(axis=1))}
    return {"threshold": choose_threshold(independent_probabilities(logits), calibration.holds).model_dump()}


def _save(
    folder: Path, config: LinearConfig, trained: LinearTrained, split: StratifiedSplit, figures: dict[str, Any]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / HISTORY_FILE, [asdict(epoch) for epoch in trained.history])
    _write_json(
        folder / PARTITIONS_FILE, {name: [text.digest for text in part] for name, part in split.partitions.items()}
    )
    _write_json(folder / EVALUATION_FILE, {"partition": TEST, "figures": figures})
    save_linear(folder, config, trained.head)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def untrained_labels(pooled: Pooled, labels: tuple[str, ...]) -> list[str]:
    """The labels that hold of no text of a partition."""
    return [labels[i] for i in np.flatnonzero(~pooled.holds.any(axis=0)).tolist()]
