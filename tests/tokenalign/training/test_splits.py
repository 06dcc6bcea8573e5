"""Splits: disjoint by label, without shared texts, the same for the same seed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tokenalign.errors import DataError
from tokenalign.training.data import BANKING_DOMAINS, Corpus, Example, normalised, read_banking77, read_clinc150
from tokenalign.training.recipes import RECIPES
from tokenalign.training.sources import BANKING77, CLINC150, ensure_files
from tokenalign.training.splits import (
    Duplicates,
    Split,
    describe,
    make_label_split,
    make_message_split,
    make_split,
    partition_hashes,
    shared_texts,
    split_labels,
)

SIZES = (2, 2, 2)


def corpus(train: list[tuple[str, str]], test: list[tuple[str, str]]) -> Corpus:
    """Six labels, a to f, each with the messages given and three of its own."""
    own = [Example(f"{label} {kind}", label) for label in "abcdef" for kind in ("one", "two", "three")]
    return Corpus(
        tuple("abcdef"),
        {
            "train": (*own, *(Example(*row) for row in train)),
            "test": (*(Example(f"{label} test", label) for label in "abcdef"), *(Example(*row) for row in test)),
        },
    )


def test_label_groups_are_disjoint_and_whole() -> None:
    """Groups have the sizes asked for, share nothing, and follow from the seed alone."""
    labels = [f"l{i}" for i in range(12)]
    groups = split_labels(labels, 42, (7, 3, 2))
    assert [len(group) for group in groups] == [7, 3, 2]
    assert sorted(name for group in groups for name in group) == sorted(labels)
    assert split_labels(labels[::-1], 42, (7, 3, 2)) == groups
    assert split_labels(labels, 43, (7, 3, 2)) != groups


@pytest.mark.parametrize("sizes", [(7, 3, 1), (7, 3, 3), (11, 1, 0)])
def test_impossible_label_groups(sizes: tuple[int, int, int]) -> None:
    """Groups that don't add up, or can't be told apart, are errors that state the count."""
    with pytest.raises(DataError, match="12 labels"):
        split_labels([f"l{i}" for i in range(12)], 42, sizes)


def test_validation_partitions_share_labels_and_no_message() -> None:
    """The two validation partitions divide the messages of the validation labels."""
    split = make_split(corpus([], []), 3, SIZES)
    select, calibrate = (
        {example.text for example in split.partitions[f"validation_{name}"]} for name in ("select", "calibrate")
    )
    assert len(select) == len(calibrate) == 3
    assert not select & calibrate
    assert {text[0] for text in select | calibrate} <= set(split.validation_labels)


def test_texts_across_partitions_stay_in_the_held_out_one() -> None:
    """A text that test or validation has, by case and white space, is not trained on, whatever its label."""
    plain = make_split(corpus([], []), 3, SIZES)
    trained, validated, tested = plain.train_labels[0], plain.validation_labels[0], plain.test_labels[0]
    split = make_split(
        corpus(
            [(f"{tested}  TEST", trained), ("Shared by  two", trained), ("shared by two", validated), ("new", trained)],
            [(f"{tested} Test", tested)],
        ),
        3,
        SIZES,
    )
    assert split.removed == {
        "test": Duplicates(normalised=1),
        "validation": Duplicates(),
        "train": Duplicates(normalised=2, other_label=2),
    }
    assert len(split.partitions["train"]) == len(plain.partitions["train"]) + 1
    assert shared_texts(split) == {"test": 0, "validation_select": 0, "validation_calibrate": 0}


def test_shared_texts_are_counted() -> None:
    """The leakage check itself finds a text that stands on both sides, under another label and in other case."""
    partitions = {
        "test": (Example("A  card", "x"), Example("other", "x")),
        "validation_select": (),
        "validation_calibrate": (Example("a CARD", "y"),),
        "train": (),
        "train_extra": (Example("a card", "z"),),
    }
    split = Split(0, ("z",), ("y",), ("x",), partitions, {})
    assert shared_texts(split) == {"test": 1, "validation_select": 0, "validation_calibrate": 1}


def test_extra_labels_that_read_like_held_out_ones_are_left_out() -> None:
    """A second source must not train a test or validation label under another source's name."""
    plain = make_split(corpus([], []), 3, SIZES)
    twin, other = plain.test_labels[0].upper(), "unrelated"
    extra = Corpus((twin, other), {"train": (Example("say so", twin), Example("say that", other))})
    split = make_split(corpus([], []), 3, SIZES, extra)
    assert [example.label for example in split.partitions["train_extra"]] == [other]


def test_unseen_test_messages() -> None:
    """Unseen test messages are those of the test labels; the test partition holds those of all."""
    split = make_split(corpus([], []), 3, SIZES)
    assert {example.label for example in split.unseen_test} == set(split.test_labels)
    assert {example.label for example in split.partitions["test"]} == set(split.all_labels)


def test_hashes_follow_the_examples() -> None:
    """A changed message changes its own hash and its partition's, and no other."""
    one, two = (make_split(corpus([], [(text, "a")]), 3, SIZES) for text in ("was this", "was that"))
    assert describe(one)["partitions"]["train"] == describe(two)["partitions"]["train"]
    assert describe(one)["partitions"]["test"]["sha256"] != describe(two)["partitions"]["test"]["sha256"]
    changed = [a != b for a, b in zip(partition_hashes(one)["test"], partition_hashes(two)["test"], strict=True)]
    assert changed == [False] * 6 + [True]


@pytest.mark.data
@pytest.mark.parametrize("seed", [42, 1, 2])
def test_real_splits(data_root: Path, seed: int) -> None:
    """Banking77 splits into 50, 12 and 15 labels without a text shared between training and anything held out."""
    banking77 = read_banking77(ensure_files(BANKING77, data_root, local_only=True))
    domains = ("travel", "home", "utility", "work", "small_talk", "meta", "auto_and_commute", "kitchen_and_dining")
    assert not BANKING_DOMAINS & set(domains)
    clinc150 = read_clinc150(ensure_files(CLINC150, data_root, local_only=True), domains)
    split = make_split(banking77, seed, (50, 12, 15), clinc150)
    assert [len(split.train_labels), len(split.validation_labels), len(split.test_labels)] == [50, 12, 15]
    assert len(set(split.all_labels)) == 77
    trained = {normalised(e.text) for name in ("train", "train_extra") for e in split.partitions[name]}
    for name in ("test", "validation_select", "validation_calibrate"):
        assert not trained & {normalised(e.text) for e in split.partitions[name]}
    assert len(split.partitions["test"]) == 3_079
    assert abs(len(split.partitions["validation_select"]) - len(split.partitions["validation_calibrate"])) <= 1
    assert "exchange_rate" in banking77.labels
    if "exchange_rate" not in split.train_labels:
        assert all(example.label != "exchange_rate" for example in split.partitions["train_extra"])


def test_the_shipped_recipe_never_trains_on_banking_domains() -> None:
    """CLINC150's banking domains overlap the zero-shot test labels, so no built-in recipe may name one."""
    for recipe in RECIPES.values():
        assert not BANKING_DOMAINS & set(recipe.clinc150_domains), recipe.name


def own(labels: int, messages: int, *more: tuple[str, str]) -> Corpus:
    """A corpus of one file: so many labels of so many messages each, and the rows given."""
    rows = [Example(f"{label} message {i}", f"label {label}") for label in range(labels) for i in range(messages)]
    examples = (*rows, *(Example(*row) for row in more))
    return Corpus(tuple(dict.fromkeys(example.label for example in examples)), {"train": examples})


def test_any_corpus_splits_by_label() -> None:
    """In Banking77's proportions; test labels' messages are all held out, of other labels a fifth, none twice."""
    corpus = own(20, 10)
    split = make_label_split(corpus, 5)
    assert [len(split.train_labels), len(split.validation_labels), len(split.test_labels)] == [13, 3, 4]
    assert len(split.unseen_test) == 40
    assert len(split.seen_test) == 13 * 2
    texts = [example.text for part in split.partitions.values() for example in part]
    assert sorted(texts) == sorted(example.text for example in corpus.examples["train"])
    held_out = {*split.validation_labels, *split.test_labels}
    assert not held_out & {example.label for example in split.partitions["train"]}
    assert partition_hashes(split) == partition_hashes(make_label_split(own(20, 10), 5))
    assert partition_hashes(split) != partition_hashes(make_label_split(own(20, 10), 6))


def test_any_corpus_splits_by_message() -> None:
    """Every label is in every partition, in the same proportions, and no message is in two."""
    split = make_message_split(own(3, 20), 5)
    assert split.train_labels == split.validation_labels == split.test_labels == split.all_labels
    sizes = {name: len(part) for name, part in split.partitions.items()}
    assert sizes == {"test": 12, "validation_select": 3, "validation_calibrate": 6, "train": 39}
    for part in split.partitions.values():
        assert {example.label for example in part} == set(split.all_labels)
    assert shared_texts(split) == {"test": 0, "validation_select": 0, "validation_calibrate": 0}
    assert describe(split)["kind"] == "messages"


@pytest.mark.parametrize("make", [make_label_split, make_message_split])
def test_duplicates_never_stand_on_both_sides(make: Callable[[Corpus, int], Split]) -> None:
    """Equal texts, ones that differ by case or white space, and ones with two labels are left out and counted."""
    twins = [(f"{label}  MESSAGE {i}", f"label {label}") for label in range(8) for i in range(6)]
    exact = [(f"{label} message 0", f"label {label}") for label in range(8)]
    split = make(own(8, 12, *twins, *exact, ("1 message 1", "label 2")), 1)
    removed = list(split.removed.values())
    assert sum(found.total for found in removed) == len(twins) + len(exact) + 1
    assert sum(found.other_label for found in removed) >= 1
    assert sum(found.exact for found in removed) >= 1
    assert set(shared_texts(split).values()) == {0}


def test_a_test_partition_of_its_own_is_the_test() -> None:
    """Nothing of the other file is tested on, and what both have is not trained on."""
    corpus = own(8, 10)
    test = (Example("0 MESSAGE 3", "label 0"), Example("new", "label 1"))
    for split in (
        make_message_split(Corpus(corpus.labels, corpus.examples | {"test": test}), 1),
        make_label_split(Corpus(corpus.labels, corpus.examples | {"test": test}), 1),
    ):
        assert split.partitions["test"] == test
        assert set(shared_texts(split).values()) == {0}


def test_too_little_to_split() -> None:
    """Too few labels, or messages of one, are errors that say how many are needed and what else can be done."""
    with pytest.raises(DataError, match=r"5 labels can't be divided .* takes 6; .*--split messages"):
        make_label_split(own(5, 10), 1)
    with pytest.raises(DataError, match=r"label 'rare' has 1 distinct message, at least 5"):
        make_message_split(own(3, 10, ("once", "rare"), (" ONCE", "rare")), 1)
