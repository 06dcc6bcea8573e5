"""What a head is measured on: its own held-out messages, found by how it was trained, or any file with labels."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tokenalign.backbone import DType
from tokenalign.config import ModelConfig
from tokenalign.errors import DataError, InputError
from tokenalign.label_files import LabelFile
from tokenalign.labels import Label, LabelSet
from tokenalign.references import sha256_of
from tokenalign.training.data import (
    Example,
    label_words,
    read_banking77,
    read_clinc150,
    read_clinc150_domains,
    read_clinc150_out_of_scope,
)
from tokenalign.training.material import PUBLIC_SOURCES, Sources
from tokenalign.training.own_data import OwnData, OwnFiles, read_examples, read_own, read_texts
from tokenalign.training.own_run import LABELS_FILE
from tokenalign.training.recipes import BANKING77_RECIPE
from tokenalign.training.resampling import RESAMPLES
from tokenalign.training.run import PARTITIONS_FILE
from tokenalign.training.sources import ensure_files
from tokenalign.training.splits import HELD_OUT, Split, describe, make_split

SPLITS = {
    "unseen": "test messages of the labels that were never trained on, those labels as candidates",
    "seen": "test messages of the labels that were trained on, those labels as candidates",
    "all": "all test messages, all labels as candidates",
    "validation": "the messages that chose the head's best epoch, of the validation labels",
    "clinc150": "CLINC150's test messages, all its intents as candidates, out-of-scope left out",
    "clinc150-unseen": "the same of the domains that the head was not trained on",
}
FILE_SPLIT = "file"
ERASURE_TEXTS = 200
WHAT = SPLITS | {FILE_SPLIT: "every message of the file, its labels as candidates"}

Descriptions = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssessOptions:
    """Which head to measure, and on what.

    model: as for `TokenAlignClassifier.from_pretrained`; None is the shipped default
    splits: names in `SPLITS`; None takes the usual ones of the head's data
    data, test_data, labels: a user's files, see `OwnFiles`: those that the head was trained on give the splits that it
        was trained by, any other file is measured whole
    seed: the split of a head that doesn't say how it was split; one that does keeps to its own
    compare: other heads to measure on the same messages
    erasure_texts: texts of each split whose words are deleted; 0 leaves that out
    resamples: of the bootstrap; 0 leaves intervals and comparisons out
    out_of_scope: a file of texts that no label fits, or `CLINC150` for that data set's
    wordings: a file of formulations of the labels, see `wording_study`
    nli, gliclass: folders of such models' weights
    cost: whether speed and memory are measured
    """

    model: str | None
    data_dir: Path
    splits: tuple[str, ...] | None = None
    data: Path | None = None
    test_data: Path | None = None
    labels: Path | None = None
    text_column: str | None = None
    label_column: str | None = None
    seed: int | None = None
    compare: tuple[str, ...] = ()
    erasure_texts: int = ERASURE_TEXTS
    resamples: int = RESAMPLES
    out_of_scope: Path | Literal["clinc150"] | None = None
    wordings: Path | None = None
    nli: Path | None = None
    gliclass: Path | None = None
    cost: bool = False
    backbone: str | None = None
    device: str = "auto"
    dtype: DType = "auto"
    cache_dir: str | os.PathLike[str] | None = None
    local_only: bool = False
    sources: Sources = PUBLIC_SOURCES


@dataclass(frozen=True, slots=True, eq=False)
class TestSet:
    """Messages, `[messages]` positions of their labels, and the candidates."""

    __test__ = False  # pytest takes a class of this name for tests

    texts: tuple[str, ...]
    targets: NDArray[np.int64]
    labels: LabelSet

    @classmethod
    def of(
        cls, examples: Sequence[Example], labels: Sequence[str], descriptions: Descriptions | None = None
    ) -> "TestSet":
        """The set of examples, each of one of `labels`, which their names as words describe where nothing else does."""
        position = {label: i for i, label in enumerate(labels)}
        return cls(
            tuple(example.text for example in examples),
            np.array([position[example.label] for example in examples], dtype=np.int64),
            LabelSet(tuple(Label(name, (descriptions or {}).get(name, (label_words(name),))) for name in labels)),
        )


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The messages that a head can be measured on.

    splits: what is measured where nothing else is asked for
    split: that the head was trained by; None where its data isn't at hand
    trained_on: of the file that is measured, the rows that the head was trained on, as far as its folder tells
    """

    config: ModelConfig
    options: AssessOptions
    splits: tuple[str, ...]
    split: Split | None
    own: OwnData | None = None
    trained_on: int | None = None

    @property
    def calibration(self) -> TestSet | None:
        """The messages that the head's temperature was fitted on, on which those of baselines are fitted too."""
        return self._validation("validation_calibrate")

    @property
    def training(self) -> tuple[Example, ...]:
        """The messages that the head was trained on, other sources' left out; none where they aren't at hand."""
        return () if self.split is None else self.split.partitions["train"]

    def out_of_scope(self) -> tuple[str, ...]:
        """The texts that no label fits; none where they aren't asked for."""
        options = self.options
        if options.out_of_scope is None:
            return ()
        if isinstance(options.out_of_scope, Path):
            return read_texts(options.out_of_scope, options.text_column or "text")
        source = options.sources.clinc150
        return read_clinc150_out_of_scope(ensure_files(source, options.data_dir, local_only=options.local_only))

    def test_set(self, name: str) -> TestSet:
        """The messages and candidates of a split; `InputError` for one that this head doesn't have."""
        if name not in WHAT:
            raise InputError(f"{name!r} is unknown; choose among {', '.join(SPLITS)}", ("split",))
        if name.startswith("clinc150"):
            return self._clinc150(name)
        if self.split is None:
            if self.own is None or name != FILE_SPLIT:
                raise InputError(
                    f"{name!r} needs the data that {self.config.name!r} was trained on; a file that it wasn't is "
                    "measured whole, so leave --split out",
                    ("split",),
                )
            return TestSet.of(self.own.corpus.examples["train"], self.own.corpus.labels, self.descriptions)
        if name == "validation":
            chosen = self._validation("validation_select")
            assert chosen is not None  # noqa: S101  there is a split
            return chosen
        if name == "all":
            return self._of(self.split.partitions["test"], self.split.all_labels)
        if name == "unseen" and self.split.kind == "labels":
            return self._of(self.split.unseen_test, self.split.test_labels)
        if name == "seen":
            return self._of(self.split.seen_test, sorted(self.split.train_labels))
        raise InputError(f"{self.config.name!r} was trained on every label, so {name!r} is empty; use all", ("split",))

    @property
    def descriptions(self) -> Descriptions | None:
        """Label -> its descriptions, where the data is the user's own."""
        return None if self.own is None else self.own.descriptions

    def _of(self, examples: Sequence[Example], labels: Sequence[str]) -> TestSet:
        if not examples:
            raise DataError("no test messages are left of these labels; give --test-data, or choose another split")
        return TestSet.of(examples, labels, self.descriptions)

    def _validation(self, name: str) -> TestSet | None:
        if self.split is None:
            return None
        return TestSet.of(self.split.partitions[name], self.split.validation_labels, self.descriptions)

    def _clinc150(self, name: str) -> TestSet:
        options = self.options
        folder = ensure_files(options.sources.clinc150, options.data_dir, local_only=options.local_only)
        recipe = self.config.provenance.get("recipe", {})
        trained = recipe.get("clinc150_domains", ()) if name == "clinc150-unseen" else ()
        domains = [domain for domain in read_clinc150_domains(folder) if domain not in trained]
        if not domains:
            raise InputError(
                f"{self.config.name!r} was trained on every domain of CLINC150; choose another split", ("split",)
            )
        corpus = read_clinc150(folder, domains)
        return TestSet.of(corpus.examples["test"], corpus.labels)


def held_out(config: ModelConfig, folder: Path, options: AssessOptions) -> HeldOut:
    """What the head in `folder` can be measured on; `DataError` where its data isn't what it was trained on."""
    of_own = config.provenance.get("data", {}).get("own")
    if options.data is None:
        if of_own is not None:
            raise InputError(
                f"{config.name!r} was trained on {of_own['data']['file']!r}; give that file, or another one with "
                "messages and labels, with --data",
                ("data",),
            )
        return HeldOut(config, options, ("unseen", "all"), split_of(config, options))
    labels = options.labels
    if labels is None and (folder / LABELS_FILE).is_file():
        labels = folder / LABELS_FILE
    if of_own is None or sha256_of(options.data) != of_own["data"]["sha256"]:
        return _whole_file(config, folder, options, labels)
    split = config.provenance["split"]
    own = read_own(_files(config, options, options.data, options.test_data, labels))
    found = own.split(split["kind"], split["seed"])
    _check_partitions(config, found, "the files that it was trained on, --test-data included")
    return HeldOut(config, options, ("unseen", "all") if found.kind == "labels" else ("all",), found, own)


def split_of(config: ModelConfig, options: AssessOptions) -> Split:
    """The split of Banking77 that the head was trained by, checked against its hashes; or that of `options.seed`."""
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
    _check_partitions(config, split, "the release of tokenalign that trained it")
    return split


def _check_partitions(config: ModelConfig, split: Split, remedy: str) -> None:
    kept, now = config.provenance.get("split", {}), describe(split)["partitions"]
    for name in HELD_OUT:
        if kept and kept["partitions"][name] != now[name]:
            raise DataError(
                f"partition {name!r} of seed {split.seed} is not the one that {config.name!r} was made by "
                f"({now[name]} against {kept['partitions'][name]}); use {remedy}"
            )


def _whole_file(config: ModelConfig, folder: Path, options: AssessOptions, labels: Path | None) -> HeldOut:
    assert options.data is not None  # noqa: S101  the caller looked
    files = _files(config, options, options.data, None, labels)
    if options.labels is None and labels is not None and not _describes(labels, files):
        files = replace(files, labels=None)
    own = read_own(files)
    return HeldOut(config, options, (FILE_SPLIT,), None, own, _trained_on(folder, own.corpus.examples["train"]))


def _describes(labels: Path, files: OwnFiles) -> bool:
    """Whether the head's own labels file has all labels of the data, which may be about other ones."""
    wanted = {example.label for example in read_examples(files.data, files.text_column, files.label_column)}
    return wanted <= {label.name for label in LabelFile.read(labels).label_set().labels}


def _files(config: ModelConfig, options: AssessOptions, data: Path, test: Path | None, labels: Path | None) -> OwnFiles:
    usual = config.provenance.get("data", {}).get("own", {}).get("columns", ["text", "label"])
    return OwnFiles(
        data=data,
        test=test,
        labels=labels,
        text_column=options.text_column or usual[0],
        label_column=options.label_column or usual[1],
    )


def _trained_on(folder: Path, examples: Sequence[Example]) -> int | None:
    """How many of the examples the head was trained on, by the hashes that its run left; None where it left none."""
    path = folder / PARTITIONS_FILE
    if not path.is_file():
        return None
    hashes = json.loads(path.read_text(encoding="utf-8"))
    trained = {digest for name, digests in hashes.items() if name not in HELD_OUT for digest in digests}
    return sum(example.digest in trained for example in examples)
