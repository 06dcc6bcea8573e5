"""The calibrations of a head that is there already, for `multi_label` and abstention; weights and temperature stay."""

from pathlib import Path
from typing import Any

from tokenalign.classifier import TokenAlignClassifier
from tokenalign.config import CONFIG_FILE, ModelConfig
from tokenalign.errors import InputError, TrainingError
from tokenalign.training.assessment import OnStep
from tokenalign.training.calibration import fit_abstention, fit_multi_label, multi_label_figures
from tokenalign.training.held_out import AssessOptions, TestSet, held_out
from tokenalign.training.meaning import answers

PARTITIONS = ("validation_select", "validation_calibrate")  # fitted on the second, as the temperature was


def recalibrate(folder: Path, options: AssessOptions, *, on_step: OnStep | None = None) -> ModelConfig:
    """The head's configuration with its new `multi_label` and `abstention`, which now lies in the folder's config.json.

    options: where data and encoder are; `model` is not read, the head is the one in `folder`
    Raises `InputError` for a folder that holds no head of ours, `TrainingError` where the head's logits don't rise with
    being right, and `DataError` when the data isn't what the head was split by.
    """
    tell = on_step or (lambda what: None)
    if not (folder / CONFIG_FILE).is_file():
        raise InputError(f"{folder} has no {CONFIG_FILE}; give the folder of a head", ("folder",))
    config = ModelConfig.load(folder / CONFIG_FILE)  # as it is written, whatever encoder is used to read it
    held = held_out(config, folder, options)
    tell("loading the model")
    classifier = TokenAlignClassifier.from_pretrained(
        folder,
        backbone=options.backbone,
        device=options.device,
        dtype=options.dtype,
        cache_dir=options.cache_dir,
        local_files_only=options.local_only,
    )
    if held.split is None:
        raise InputError("is not the file that the head was trained on; give that one", ("data",))
    found = {}
    for name in PARTITIONS:
        chosen = TestSet.of(held.split.partitions[name], held.split.validation_labels, held.descriptions)
        tell(f"{name}: {len(chosen.texts):,} messages, {len(chosen.labels)} labels")
        found[name] = (answers(classifier, chosen.texts, chosen.labels).logits, chosen.targets)
    multi_label = fit_multi_label(*found["validation_calibrate"])
    if multi_label is None:
        raise TrainingError(
            f"{folder}: logits are no higher where a label holds, so no calibration fits; train the head further"
        )
    abstention = fit_abstention(found["validation_calibrate"][0], multi_label)
    figures = {name: multi_label_figures(logits, targets, multi_label) for name, (logits, targets) in found.items()}
    training: dict[str, Any] = dict(config.provenance.get("training", {}))
    provenance = config.provenance | {"training": training | {"multi_label": figures}}
    final = config.model_copy(update={"multi_label": multi_label, "abstention": abstention, "provenance": provenance})
    final.save(folder / CONFIG_FILE)
    return final
