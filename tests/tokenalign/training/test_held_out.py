"""What a head trained on a user's file is measured on."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tokenalign.errors import DataError, InputError
from tokenalign.training.held_out import FILE_SPLIT, AssessOptions, HeldOut, held_out
from tokenalign.training.own_data import OwnFiles
from tokenalign.training.own_run import OWN_RECIPE
from tokenalign.training.run import PARTITIONS_FILE, RunOptions, run_training

WriteOwn = Callable[..., Path]
Find = Callable[..., HeldOut]


@pytest.fixture
def data(write_own: WriteOwn) -> Path:
    """The file that the head is trained on."""
    return write_own("mine.csv")


@pytest.fixture(params=["labels", "messages"])
def find(request: pytest.FixtureRequest, data: Path, run_options: Callable[..., RunOptions]) -> Find:
    """Finds what a head of one split of that file is measured on; keywords are options."""
    recipe = replace(OWN_RECIPE, name="mine", max_epochs=1)
    options = run_options(recipe, own=OwnFiles(data=data, split=request.param))
    config = run_training(options)

    def of(**overrides: object) -> HeldOut:
        plain = AssessOptions(model=None, data_dir=options.data_dir, data=data)
        return held_out(config, options.output, replace(plain, **overrides))  # type: ignore[arg-type]  # by name

    return of


def test_its_own_file_gives_its_own_test(find: Find) -> None:
    """The very messages that its run held out, none of them trained on, and the labels that go with each split."""
    held = find()
    assert held.split is not None
    kept = held.config.provenance["split"]
    assert [example.digest for example in held.split.partitions["test"]]
    trained = {example.text for example in held.training}
    for name in (*held.splits, "validation"):
        chosen = held.test_set(name)
        assert chosen.texts
        assert not trained & set(chosen.texts)
    whole = held.test_set("all")
    assert len(whole.labels) == 8
    if kept["kind"] == "labels":
        assert held.splits == ("unseen", "all")
        assert held.test_set("unseen").labels.names == tuple(kept["test_labels"])
        assert set(held.test_set("seen").labels.names) == set(kept["train_labels"])
    else:
        assert held.splits == ("all",)
        with pytest.raises(InputError, match="trained on every label, so 'unseen' is empty; use all"):
            held.test_set("unseen")
    calibration = held.calibration
    assert calibration is not None
    assert calibration.labels.names == tuple(kept["validation_labels"])


def test_without_the_file_it_is_asked_for(find: Find) -> None:
    """A head of a user's own has no public data; the file is named."""
    with pytest.raises(InputError, match=r"was trained on 'mine\.csv'; give that file") as caught:
        find(data=None)
    assert caught.value.loc == ("data",)


def test_another_file_is_measured_whole(find: Find, write_own: WriteOwn) -> None:
    """Its messages are all tested, and those that the head was trained on are counted, by the run's hashes."""
    held = find(data=write_own("new.csv", lead="please"))
    assert (held.splits, held.split, held.trained_on, held.calibration) == ((FILE_SPLIT,), None, 0, None)
    assert len(held.test_set(FILE_SPLIT).texts) == 80
    with pytest.raises(InputError, match=r"'all' needs the data that .* was trained on"):
        held.test_set("all")
    longer = write_own("longer.csv")
    with longer.open("a") as file:
        file.write("one more,card_declined\n")
    again = find(data=longer)
    assert again.trained_on == sum(
        find().config.provenance["split"]["partitions"][name]["examples"] for name in ["train"]
    )


def test_without_hashes_nobody_knows(find: Find, write_own: WriteOwn, run_options: Callable[..., RunOptions]) -> None:
    """A head whose folder lost its partitions can't tell what it was trained on."""
    options = run_options(OWN_RECIPE)
    (options.output / PARTITIONS_FILE).unlink()
    assert find(data=write_own("new.csv", lead="please")).trained_on is None


def test_other_labels_are_described_by_their_names(find: Find, tmp_path: Path) -> None:
    """The head's own labels file describes its labels; labels that it doesn't have are read as words."""
    other = tmp_path / "other.csv"
    other.write_text("text,label\nhi,say_hello\nbye,say_goodbye\n")
    assert find(data=other).test_set(FILE_SPLIT).labels.descriptions == ("say hello", "say goodbye")


def test_a_file_that_was_split_otherwise_is_refused(find: Find, data: Path, tmp_path: Path) -> None:
    """Without the test file that it was trained with, the partitions differ, which is an error and no better score."""
    test = tmp_path / "test.csv"
    test.write_text("text,label\nhelp my card was declined a,card_declined\nnew,cash_declined\n")
    with pytest.raises(DataError, match=r"partition 'test' of seed 42 is not the one .* --test-data included"):
        find(test_data=test)


def test_out_of_scope_texts_of_a_file(find: Find, tmp_path: Path) -> None:
    """A file of texts that no label fits needs no labels; none are asked for by default."""
    path = tmp_path / "other.csv"
    path.write_text("text\nwho won\nwhat is the weather\n")
    assert find(out_of_scope=path).out_of_scope() == ("who won", "what is the weather")
    assert find().out_of_scope() == ()


def test_clinc150s_out_of_scope_texts(
    find: Find, small_data: Path, small_sources: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are its test queries without an intent; a file that has none is named."""
    monkeypatch.setattr("tokenalign.training.held_out.ensure_files", lambda *rest, **options: tmp_path)
    (tmp_path / "data_full.json").write_text(
        json.dumps({"oos_test": [["who won", "oos"]], "oos_train": [["x", "oos"]]})
    )
    assert find(out_of_scope="clinc150").out_of_scope() == ("who won",)
    (tmp_path / "data_full.json").write_text("{}")
    with pytest.raises(DataError, match="has no list 'oos_test'"):
        find(out_of_scope="clinc150").out_of_scope()
