"""A whole training run: from options to a folder with a head, its history and the hashes of what it saw."""

import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenalign.backbone import DType
from tokenalign.config import CONFIG_FILE, BackboneReference, ModelConfig, fingerprint_of
from tokenalign.errors import TrainingError
from tokenalign.evaluation import Metrics, evaluate, softmax_at
from tokenalign.head import AlignmentHead
from tokenalign.training.calibration import fit_abstention, fit_multi_label, fit_temperature, multi_label_figures
from tokenalign.training.checkpoint import CHECKPOINT_FILE
from tokenalign.training.encoder import MINILM, Encoder, load_encoder
from tokenalign.training.material import PUBLIC_SOURCES, Material, OnFeatures, Sources, Validation, prepare
from tokenalign.training.own_data import OwnFiles, read_own
from tokenalign.training.own_run import for_labels, prepare_own, write_labels
from tokenalign.training.recipes import Recipe
from tokenalign.training.splits import Split, describe, partition_hashes
from tokenalign.training.trainer import OnEpoch, OnProgress, Trained, train_head, validation_logits
from tokenalign.weights import save_head

HISTORY_FILE = "history.json"
PARTITIONS_FILE = "partitions.json"


OnSplit = Callable[[Split, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What to train, on what, and where to.

    output: a folder that is empty or absent, or holds the interrupted run when `resume`
    feature_dir: where token states are kept; runs share it
    own: the user's data to train on instead of the recipe's
    head_shape: width, blocks, heads or ffn_width where they shouldn't be the card's
    """

    recipe: Recipe
    output: Path
    data_dir: Path
    feature_dir: Path
    seed: int = 42
    backbone: BackboneReference = MINILM
    device: str = "auto"
    dtype: DType = "auto"
    cache_dir: str | os.PathLike[str] | None = None
    local_only: bool = False
    resume: bool = False
    own: OwnFiles | None = None
    sources: Sources = PUBLIC_SOURCES
    head_shape: tuple[tuple[str, int], ...] = ()


def run_training(
    options: RunOptions,
    *,
    on_split: OnSplit | None = None,
    on_features: OnFeatures | None = None,
    on_progress: OnProgress | None = None,
    on_epoch: OnEpoch | None = None,
) -> ModelConfig:
    """The configuration of the head that now lies in `options.output`, its provenance and validation figures in it.

    Beside config.json and model.safetensors the folder gets history.json and partitions.json, and labels.jsonl where
    the data is the user's own. Raises `TrainingError` when the folder is in use, `DataError` when the data isn't what
    it should be.
    """
    check_output(options.output, options.resume)
    own = None if options.own is None else read_own(options.own)  # before the encoder is loaded, which takes seconds
    recipe = options.recipe if own is None else for_labels(options.recipe, own.labels)
    encoder = load_encoder(
        options.backbone,
        name=recipe.name,
        label_template=recipe.label_template,
        device=options.device,
        dtype=options.dtype,
        cache_dir=options.cache_dir,
        local_files_only=options.local_only,
    )
    config = encoder.config.model_copy(update=dict(options.head_shape))
    config = ModelConfig.parse(config.model_dump())  # a copy skips validation
    if own is None or options.own is None:
        material = prepare(
            recipe,
            options.seed,
            encoder,
            data_dir=options.data_dir,
            feature_dir=options.feature_dir,
            local_only=options.local_only,
            sources=options.sources,
            on_features=on_features,
        )
    else:
        material = prepare_own(
            recipe,
            options.seed,
            encoder,
            own,
            options.own.split,
            feature_dir=options.feature_dir,
            on_features=on_features,
        )
    if on_split is not None:
        full = sum(int((store.lengths >= config.max_length).sum()) for store in material.messages.stores)
        on_split(material.split, full)
    provenance = provenance_of(recipe, options.seed, encoder, material)
    options.output.mkdir(parents=True, exist_ok=True)  # left empty until there is something to resume
    trained = train_head(
        recipe,
        options.seed,
        config,
        material,
        device=encoder.backbone.device,
        folder=options.output,
        run=fingerprint_of({"config": config.model_dump(mode="json"), "provenance": provenance}),
        on_progress=on_progress,
        on_epoch=on_epoch,
    )
    if own is not None:
        write_labels(options.output, own.labels)
    return save_run(options.output, config, material, provenance, trained)


def check_output(folder: Path, resume: bool) -> None:
    """Raise `TrainingError` unless a run can write to `folder`: a fresh one, or an unfinished one to resume."""
    if resume:
        if not (folder / CHECKPOINT_FILE).exists():
            raise TrainingError(
                f"{folder} has no {CHECKPOINT_FILE}, so there is nothing to resume"
                + (": the run in it is finished" if (folder / CONFIG_FILE).exists() else "; leave --resume out")
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TrainingError(
            f"{folder} exists and is not empty; name a fresh --output, or go on with an interrupted run with --resume"
        )


def provenance_of(recipe: Recipe, seed: int, encoder: Encoder, material: Material) -> dict[str, Any]:
    """What a head's numbers depend on: recipe, seed, data, split, encoder, versions; no date, so that runs compare."""
    return {
        "recipe": json.loads(json.dumps(asdict(recipe))),
        "seed": seed,
        "data": material.provenance,
        "split": describe(material.split),
        "backbone": asdict(encoder.backbone.identity),
        "tokenizer_sha256": material.tokenizer_digest,
        "device": encoder.backbone.device.type,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("tokenalign", "torch", "transformers", "tokenizers", "numpy")},
        },
    }


def save_run(
    folder: Path, config: ModelConfig, material: Material, provenance: dict[str, Any], trained: Trained
) -> ModelConfig:
    """Calibrate and write everything; the checkpoint goes last, so an interrupted end can be resumed."""
    logits = validation_logits(trained.head, material, material.calibrate.documents)
    temperature = fit_temperature(logits, material.calibrate.targets)
    multi_label = fit_multi_label(logits / temperature, material.calibrate.targets)
    figures = {
        "best_epoch": trained.best_epoch,
        "epochs": len(trained.history) - 1,
        "scale": float(trained.head.scale.detach()),
        "validation_select": _figures(trained.head, material, material.select, temperature),
        "validation_calibrate": _figures(trained.head, material, material.calibrate, temperature),
    }
    if multi_label is not None:
        selected = validation_logits(trained.head, material, material.select.documents)
        figures["multi_label"] = {
            "validation_select": multi_label_figures(selected / temperature, material.select.targets, multi_label),
            "validation_calibrate": multi_label_figures(logits / temperature, material.calibrate.targets, multi_label),
        }
    final = config.model_copy(
        update={
            "temperature": temperature,
            "multi_label": multi_label,
            "abstention": fit_abstention(logits / temperature, multi_label),
            "provenance": provenance | {"training": figures},
        }
    )
    _write_json(folder / HISTORY_FILE, [asdict(report) for report in trained.history])
    _write_json(folder / PARTITIONS_FILE, partition_hashes(material.split))
    save_head(folder, final, trained.head)
    (folder / CHECKPOINT_FILE).unlink(missing_ok=True)
    return final


def _figures(
    head: AlignmentHead, material: Material, validation: Validation, temperature: float
) -> dict[str, float | int]:
    """The scalar figures of one validation partition, calibrated."""
    probabilities = softmax_at(validation_logits(head, material, validation.documents), temperature)
    metrics: Metrics = evaluate(probabilities, np.asarray(validation.targets), material.validation_labels.names)
    return {name: value for name, value in metrics.as_dict().items() if name != "per_class"}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
