"""A trained head on its test splits, beside the baselines: one report of all figures."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenalign.backbone import DType
from tokenalign.classifier import TokenAlignClassifier
from tokenalign.config import ModelConfig
from tokenalign.errors import DataError, InputError
from tokenalign.evaluation import FloatArray, Metrics, evaluate, softmax_at
from tokenalign.labels import Label, LabelSet
from tokenalign.references import resolve_backbone
from tokenalign.training.baselines import LABEL_WORDINGS, CosineBaseline
from tokenalign.training.calibration import fit_temperature
from tokenalign.training.data import Example, label_words, read_banking77, read_clinc150, read_clinc150_domains
from tokenalign.training.material import PUBLIC_SOURCES, Sources
from tokenalign.training.meaning import answers, erasure
from tokenalign.training.recipes import BANKING77_RECIPE
from tokenalign.training.sources import ensure_files
from tokenalign.training.splits import Split, describe, make_split
from tokenalign.weights import locate_head

SPLITS = {
    "unseen": "Banking77's test messages of the labels that were never trained on",
    "all": "Banking77's whole test set, all its labels as candidates",
    "validation": "the messages that chose the head's best epoch, of the validation labels",
    "clinc150": "CLINC150's test messages, all its intents as candidates, out-of-scope left out",
    "clinc150-unseen": "the same of the domains that the head was not trained on",
}
ERASURE_TEXTS = 200

OnStep = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class TestSet:
    """Messages, `[messages]` positions of their labels, and the candidates."""

    __test__ = False  # pytest takes a class of this name for tests

    texts: tuple[str, ...]
    targets: NDArray[np.int64]
    labels: LabelSet

    @classmethod
    def of(cls, examples: Sequence[Example], labels: Sequence[str]) -> "TestSet":
        """The set of examples, each of one of `labels`."""
        position = {label: i for i, label in enumerate(labels)}
        return cls(
            tuple(example.text for example in examples),
            np.array([position[example.label] for example in examples], dtype=np.int64),
            LabelSet(tuple(Label(name, (label_words(name),)) for name in labels)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AssessOptions:
    """Which head to measure, and on what.

    model: as for `TokenAlignClassifier.from_pretrained`; None is the shipped default
    seed: the split of a head that doesn't say how it was split; one that does keeps to its own
    erasure_texts: texts of each split whose words are deleted; 0 leaves that out
    """

    model: str | None
    data_dir: Path
    splits: tuple[str, ...] = ("unseen", "all")
    seed: int | None = None
    erasure_texts: int = ERASURE_TEXTS
    backbone: str | None = None
    device: str = "auto"
    dtype: DType = "auto"
    cache_dir: str | os.PathLike[str] | None = None
    local_only: bool = False
    sources: Sources = PUBLIC_SOURCES


def assess(options: AssessOptions, *, on_step: OnStep | None = None) -> dict[str, Any]:
    """The report: for each split the head's figures, the baselines', and what its matches mean.

    The baselines' temperature is fitted on the partition that calibrated the head, so their NLL, Brier and ECE compare.
    on_step is told what is being done. Raises `DataError` when the data isn't what the head was split by.
    """
    tell = on_step or (lambda what: None)
    tell("loading the model")
    head_options: dict[str, Any] = {"cache_dir": options.cache_dir, "local_files_only": options.local_only}
    classifier = TokenAlignClassifier.from_pretrained(
        options.model, backbone=options.backbone, device=options.device, dtype=options.dtype, **head_options
    )
    config = classifier.config
    split = split_of(config, options)
    base = locate_head(options.model, **head_options)
    folder = resolve_backbone(config.backbone, base=base, **head_options)
    baselines = {
        name: CosineBaseline(classifier.backbone, folder, config, template) for name, template in LABEL_WORDINGS.items()
    }
    calibration = TestSet.of(split.partitions["validation_calibrate"], split.validation_labels)
    tell("calibrating the baselines")
    temperatures = {
        name: fit_temperature(_similarities(baseline, calibration), calibration.targets)
        for name, baseline in baselines.items()
    }
    results = {}
    for name in dict.fromkeys(options.splits):
        chosen = _test_set(name, split, config, options)
        tell(f"{name}: {len(chosen.texts):,} messages, {len(chosen.labels)} labels")
        found = answers(classifier, chosen.texts, chosen.labels)
        results[name] = {
            "what": SPLITS[name],
            "model": _metrics(found.logits, chosen).as_dict(),
            "baselines": {
                other: _metrics(_similarities(baseline, chosen), chosen, temperatures[other]).as_dict()
                for other, baseline in baselines.items()
            },
            "matches": {"gap": float(found.gaps.mean())} | _erasure(classifier, chosen, options, split.seed),
        }
    return {
        "model": {"name": config.name, "fingerprint": classifier.fingerprint, "temperature": config.temperature},
        "baseline_temperatures": temperatures,
        "split": describe(split),
        "results": results,
    }


def split_of(config: ModelConfig, options: AssessOptions) -> Split:
    """The split that the head was trained by, checked against the hashes that it keeps; or that of `options.seed`."""
    recipe: dict[str, Any] = config.provenance.get("recipe", {})
    kept: dict[str, Any] = config.provenance.get("split", {})
    seed = kept.get("seed", options.seed)
    if seed is None:
        raise InputError(
            f"model {config.name!r} doesn't say how its data was split; name the seed of a split whose test labels it "
            "has not seen",
            ("seed",),
        )
    folder = ensure_files(options.sources.banking77, options.data_dir, local_only=options.local_only)
    sizes = tuple(recipe.get("label_groups", BANKING77_RECIPE.label_groups))
    split = make_split(read_banking77(folder), seed, sizes)
    now = describe(split)["partitions"]
    for name in ("test", "validation_select", "validation_calibrate"):
        if kept and kept["partitions"][name] != now[name]:
            raise DataError(
                f"partition {name!r} of seed {seed} is not the one that {config.name!r} was made by "
                f"({now[name]} against {kept['partitions'][name]}); use the release of tokenalign that trained it"
            )
    return split


def _test_set(name: str, split: Split, config: ModelConfig, options: AssessOptions) -> TestSet:
    if name == "unseen":
        return TestSet.of(split.unseen_test, split.test_labels)
    if name == "all":
        return TestSet.of(split.partitions["test"], split.all_labels)
    if name == "validation":
        return TestSet.of(split.partitions["validation_select"], split.validation_labels)
    if name not in SPLITS:
        raise InputError(f"{name!r} is unknown; choose among {', '.join(SPLITS)}", ("split",))
    folder = ensure_files(options.sources.clinc150, options.data_dir, local_only=options.local_only)
    trained = config.provenance.get("recipe", {}).get("clinc150_domains", ()) if name == "clinc150-unseen" else ()
    domains = [domain for domain in read_clinc150_domains(folder) if domain not in trained]
    if not domains:
        raise InputError(f"{config.name!r} was trained on every domain of CLINC150; choose another split", ("split",))
    corpus = read_clinc150(folder, domains)
    return TestSet.of(corpus.examples["test"], corpus.labels)


def _similarities(baseline: CosineBaseline, chosen: TestSet) -> FloatArray:
    return baseline.similarities(chosen.texts, chosen.labels.descriptions)


def _metrics(logits: FloatArray, chosen: TestSet, temperature: float = 1.0) -> Metrics:
    return evaluate(softmax_at(logits, temperature), chosen.targets, chosen.labels.names)


def _erasure(classifier: TokenAlignClassifier, chosen: TestSet, options: AssessOptions, seed: int) -> dict[str, Any]:
    if options.erasure_texts == 0:
        return {}
    found = erasure(classifier, chosen.texts, chosen.labels, sample=options.erasure_texts, seed=seed)
    return {"erasure": None if found is None else found.as_dict()}
