"""Everything a run trains on, prepared: the split, and the token states of its messages and labels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenalign.labels import Label, LabelSet
from tokenalign.tokens import TokenBatch
from tokenalign.training.data import Corpus, Example, label_words, read_banking77, read_clinc150
from tokenalign.training.descriptions import own_descriptions
from tokenalign.training.encoder import Encoder
from tokenalign.training.features import Features, Float32Array, cached_states, mean_pooled
from tokenalign.training.recipes import Recipe
from tokenalign.training.sampling import Pool
from tokenalign.training.sources import BANKING77, CLINC150, DataSource, ensure_files
from tokenalign.training.splits import Split, make_split

OnFeatures = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Sources:
    """The data sets of a run; others than the public ones only in tests."""

    banking77: DataSource = BANKING77
    clinc150: DataSource = CLINC150


PUBLIC_SOURCES = Sources()


@dataclass(frozen=True, slots=True, eq=False)
class Validation:
    """Messages that are not trained on: their states, and `[messages]` positions of their labels in the candidates."""

    documents: TokenBatch
    targets: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Material:
    """What a run needs of its data.

    messages: states of all training messages; pools: their rows by source and label
    label_states: of each wording of each label, wording by wording, so row = wording · labels + label
    message_vectors, label_vectors: mean-pooled `[.., D]` for the teacher, in the order of messages and label_states;
        None where the recipe has no teacher
    validation_labels, validation_label_states: the candidates of both validation partitions, in the label template
    """

    split: Split
    provenance: dict[str, Any]
    tokenizer_digest: str
    messages: Features
    pools: tuple[Pool, ...]
    labels: tuple[str, ...]
    label_states: TokenBatch
    message_vectors: Float32Array | None
    label_vectors: Float32Array | None
    validation_labels: LabelSet
    validation_label_states: TokenBatch
    select: Validation
    calibrate: Validation


def read_corpora(
    recipe: Recipe, sources: Sources, data_dir: Path, local_only: bool
) -> tuple[Corpus, Corpus | None, dict[str, Any]]:
    """(Banking77, the recipe's domains of CLINC150 or None, provenance of both)."""
    banking77 = read_banking77(ensure_files(sources.banking77, data_dir, local_only=local_only))
    provenance: dict[str, Any] = {sources.banking77.name: sources.banking77.provenance()}
    if not recipe.clinc150_domains:
        return banking77, None, provenance
    clinc150 = read_clinc150(ensure_files(sources.clinc150, data_dir, local_only=local_only), recipe.clinc150_domains)
    provenance[sources.clinc150.name] = sources.clinc150.provenance() | {"domains": list(recipe.clinc150_domains)}
    return banking77, clinc150, provenance


def prepare(
    recipe: Recipe,
    seed: int,
    encoder: Encoder,
    *,
    data_dir: Path,
    feature_dir: Path,
    local_only: bool = False,
    sources: Sources = PUBLIC_SOURCES,
    on_features: OnFeatures | None = None,
) -> Material:
    """The material of one seed; token states come from `feature_dir` where they are there, else they are computed."""
    banking77, clinc150, provenance = read_corpora(recipe, sources, data_dir, local_only)
    split = make_split(banking77, seed, recipe.label_groups, clinc150)
    corpora = {sources.banking77.name: banking77} | ({} if clinc150 is None else {sources.clinc150.name: clinc150})
    return material_of(recipe, encoder, corpora, split, provenance, feature_dir=feature_dir, on_features=on_features)


def material_of(
    recipe: Recipe,
    encoder: Encoder,
    corpora: Mapping[str, Corpus],
    split: Split,
    provenance: dict[str, Any],
    *,
    feature_dir: Path,
    descriptions: Mapping[str, tuple[str, ...]] | None = None,
    on_features: OnFeatures | None = None,
) -> Material:
    """The material of a split of the corpora's "train" messages.

    descriptions: label -> its descriptions; None: each label's name as words. In training, wording number w of a label
        is its description number w, beginning anew where it has fewer, within the recipe's wording number w
    """

    more = own_descriptions() if recipe.described else {}

    def described(label: str) -> tuple[str, ...]:
        return (label_words(label),) if descriptions is None else descriptions[label]

    tokenizer = encoder.tokenizer()

    def encode(what: str, ids: TokenBatch) -> TokenBatch:
        report = None if on_features is None else (lambda done, total: on_features(what, done, total))
        return cached_states(encoder.backbone, ids, feature_dir, on_progress=report)

    # A source is encoded whole and in file order, so that all seeds share its states.
    texts = [example.text for corpus in corpora.values() for example in corpus.examples["train"]]
    stores = tuple(
        encode(name, tokenizer.documents([example.text for example in corpus.examples["train"]]).tokens)
        for name, corpus in corpora.items()
    )
    messages = Features(stores)
    row_of = {text: row for row, text in reversed(list(enumerate(texts)))}  # the first of equal texts

    trained = {example.label: None for name in ("train", "train_extra") for example in split.partitions.get(name, ())}
    labels = tuple(sorted(trained))
    number = {label: i for i, label in enumerate(labels)}

    def in_wording(index: int, wording: str) -> TokenBatch:
        # A large vocabulary takes seconds to load, so the tokenizer at hand is used where it fits.
        templated = tokenizer if wording == recipe.label_template else encoder.tokenizer(wording)
        ways = [(*described(label), *more.get(label, ())) for label in labels]
        words = [found[index % len(found)] for found in ways]
        return encode("labels", templated.labels(words).tokens)

    label_states = TokenBatch.concat([in_wording(i, wording) for i, wording in enumerate(recipe.wordings)])
    candidates = LabelSet(tuple(Label(name, described(name)) for name in split.validation_labels))

    def validation(partition: str) -> Validation:
        examples = split.partitions[partition]
        rows = np.array([row_of[example.text] for example in examples], dtype=np.int64)
        targets = np.array([split.validation_labels.index(example.label) for example in examples], dtype=np.int64)
        return Validation(messages.select(rows), targets)

    teacher = recipe.teacher_weight > 0
    return Material(
        split=split,
        provenance=provenance,
        tokenizer_digest=tokenizer.digest,
        messages=messages,
        pools=_pools(recipe, split, corpora, row_of, number),
        labels=labels,
        label_states=label_states,
        message_vectors=np.concatenate([mean_pooled(store) for store in stores]) if teacher else None,
        label_vectors=mean_pooled(label_states) if teacher else None,
        validation_labels=candidates,
        validation_label_states=encode("labels", tokenizer.labels(candidates.descriptions).tokens),
        select=validation("validation_select"),
        calibrate=validation("validation_calibrate"),
    )


def _pools(
    recipe: Recipe, split: Split, corpora: Mapping[str, Corpus], row_of: dict[str, int], number: dict[str, int]
) -> tuple[Pool, ...]:
    """A pool of the split's own messages, and one of the others', or one of each of their domains for episodes."""
    domains = {label: domain for corpus in corpora.values() for label, domain in corpus.domains.items()}
    extra: dict[str, list[Example]] = {}
    for example in split.partitions.get("train_extra", ()):
        extra.setdefault(domains[example.label] if recipe.episodes else "", []).append(example)
    weighted = [(split.partitions["train"], recipe.banking77_weight), *((part, 1.0) for part in extra.values())]
    return tuple(_pool(examples, row_of, number, weight) for examples, weight in weighted if examples)


def _pool(examples: Sequence[Example], row_of: dict[str, int], number: dict[str, int], weight: float) -> Pool:
    rows: dict[int, list[int]] = {}
    for example in examples:
        rows.setdefault(number[example.label], []).append(row_of[example.text])
    return Pool({label: np.array(of_label, dtype=np.int64) for label, of_label in rows.items()}, weight)
