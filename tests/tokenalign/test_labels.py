"""Label sets: what is accepted, what is refused and where, and hashes that name a list or a set."""

import pickle
import subprocess
import sys
import unicodedata
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tokenalign.errors import InputError
from tokenalign.labels import Label, LabelSet, check_text, label_hash, label_set_id, list_hash

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def refused(labels: Any, **options: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        LabelSet.of(labels, **options)
    return caught.value


def test_strings_mappings_and_labels_are_equal_ways_to_say_a_label() -> None:
    """A string is name and description; mappings and Label objects may give several descriptions."""
    labels = LabelSet.of(
        [
            "card",
            {"name": "cash"},
            {"name": "fee", "description": "a charge"},
            {"name": "top up", "description": ["adding money", "top-up"]},
            Label("other", ("something else",)),
        ]
    )
    assert labels.names == ("card", "cash", "fee", "top up", "other")
    assert labels.descriptions == ("card", "cash", "a charge", "adding money", "top-up", "something else")
    assert labels.owners == (0, 1, 2, 3, 3, 4)
    assert len(labels) == 5


def test_names_come_back_exactly_as_sent() -> None:
    """Trimming and NFC serve the comparison only."""
    names = ("  card ", "cafe\u0301")
    assert LabelSet.of(names).names == names


def test_a_label_with_commas_is_one_label() -> None:
    """Nothing is split."""
    assert LabelSet.of(["a, b", "c"]).names == ("a, b", "c")


def test_a_label_set_passes_through() -> None:
    """A set that was validated is not validated again."""
    labels = LabelSet.of(["a", "b"])
    assert LabelSet.of(labels) is labels


def test_location_of_a_description() -> None:
    """An error about one of all descriptions is told at its label, and where it has several, at the very one."""
    labels = LabelSet.of(["a", {"name": "b", "description": ["x", "y"]}, {"name": "c", "description": "z"}])
    assert [labels.location(d) for d in range(4)] == [
        ("labels", 0),
        ("labels", 1, "description", 0),
        ("labels", 1, "description", 1),
        ("labels", 2),
    ]


@pytest.mark.parametrize("labels", [LabelSet((Label("a", ("a",)),)), LabelSet(())])
def test_a_label_set_has_its_size_checked_all_the_same(labels: LabelSet) -> None:
    """A set made for logits alone, of one label, is refused where a softmax needs two."""
    assert refused(labels).loc == ("labels",)


@pytest.mark.parametrize("labels", [[], ["only"], ()])
def test_too_few_labels(labels: Any) -> None:
    """Two at least, since a softmax over one says nothing; the error says how many there were."""
    error = refused(labels)
    assert error.loc == ("labels",)
    assert f"{len(labels)} label" in error.message
    assert "at least 2" in error.message


def test_one_label_where_one_is_enough() -> None:
    """Logits need no alternative."""
    assert LabelSet.of(["only"], min_labels=1).names == ("only",)


@pytest.mark.parametrize("count", [2_048, 5])
def test_as_many_labels_as_allowed_and_one_more(count: int) -> None:
    """The limit itself is allowed; one over is an error that names both numbers."""
    names = [f"label {i}" for i in range(count + 1)]
    assert len(LabelSet.of(names[:count], max_labels=count)) == count
    error = refused(names, max_labels=count)
    assert error.loc == ("labels",)
    assert f"{count + 1:,} labels given, at most {count:,}" in error.message


def test_the_default_limit_is_2048_labels() -> None:
    """The documented default holds."""
    names = [f"label {i}" for i in range(2_049)]
    assert len(LabelSet.of(names[:-1])) == 2_048
    assert "at most 2,048" in refused(names).message


def test_as_long_a_label_as_allowed_and_one_more() -> None:
    """The length limit itself is allowed; one character over names the label and both numbers."""
    assert len(LabelSet.of(["a" * 10, "b"], max_chars=10)) == 2
    error = refused(["b", "a" * 11], max_chars=10)
    assert error.loc == ("labels", 1)
    assert "11 characters, at most 10" in error.message


@pytest.mark.parametrize("bad", ["", " ", "\n\t", "\u3000"])
def test_empty_labels(bad: str) -> None:
    """A label of nothing or of white space is refused, with its place."""
    assert refused(["a", "b", bad]).loc == ("labels", 2)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("card", "card"),
        ("card", " card\n"),
        ("caf\u00e9", "cafe\u0301"),
        ("\u1112\u1161\u11ab", "\ud55c"),
        (" caf\u00e9", "cafe\u0301 "),
    ],
)
def test_twins(first: str, second: str) -> None:
    """Labels that are equal after NFC and trimming are refused at the later one, which names the earlier."""
    error = refused(["x", first, "y", second])
    assert error.loc == ("labels", 3)
    assert "number 1" in error.message


def test_case_makes_a_difference() -> None:
    """Only NFC and white space are evened out; a cased model tells Card from card."""
    assert len(LabelSet.of(["card", "Card"])) == 2


def test_a_description_given_twice() -> None:
    """The same wording under two labels, or twice under one, can't be told apart."""
    error = refused([{"name": "a", "description": "same"}, {"name": "b", "description": ["other", "same "]}])
    assert error.loc == ("labels", 1)
    assert "label number 0" in error.message
    assert refused(["x", {"name": "a", "description": ["w", "w"]}]).loc == ("labels", 1)


def test_a_name_may_be_anothers_description_only_once() -> None:
    """A plain string is a description too, so it may not repeat one."""
    assert refused([{"name": "a", "description": "b"}, "b"]).loc == ("labels", 1)


def test_a_long_twin_is_shortened_in_the_message() -> None:
    """An error of a 100,000 character label stays readable."""
    assert len(refused(["a" * 5_000, "a" * 5_000]).message) < 200


@pytest.mark.parametrize(
    ("bad", "loc", "word"),
    [
        ("a\x00b", ("labels", 1), "NUL"),
        ("a\ud800b", ("labels", 1), "surrogate U\\+D800 at position 1"),
        (3, ("labels", 1), "int"),
        (None, ("labels", 1), "NoneType"),
        (b"bytes", ("labels", 1), "bytes"),
        (["list"], ("labels", 1), "list"),
        ({}, ("labels", 1), "no name"),
        ({"name": "n", "text": "t"}, ("labels", 1), "unknown keys \\['text'\\]"),
        ({"name": 3}, ("labels", 1, "name"), "string, not int"),
        ({"name": 3, "description": "d"}, ("labels", 1, "name"), "string, not int"),
        ({"name": "", "description": "d"}, ("labels", 1, "name"), "empty"),
        ({"name": "n", "description": ""}, ("labels", 1, "description"), "empty"),
        ({"name": "n", "description": None}, ("labels", 1, "description"), "string or a list"),
        ({"name": "n", "description": {"a": 1}}, ("labels", 1, "description"), "string or a list"),
        ({"name": "n", "description": []}, ("labels", 1, "description"), "empty list"),
        ({"name": "n", "description": ["d", "\x00"]}, ("labels", 1, "description", 1), "NUL"),
        ({"name": "n", "description": ["d", 4]}, ("labels", 1, "description", 1), "int"),
        (Label("n", ()), ("labels", 1, "description"), "empty list"),
    ],
)
def test_bad_label(bad: Any, loc: tuple[str | int, ...], word: str) -> None:
    """Each bad label is refused at the very field that is at fault."""
    with pytest.raises(InputError, match=word) as caught:
        LabelSet.of(["good", bad])
    assert caught.value.loc == loc


def test_one_string_as_descriptions_is_one_description() -> None:
    """A Label made with a string instead of a tuple is not taken apart into letters."""
    assert LabelSet.of([Label("a", "money"), "b"]).descriptions == ("money", "b")  # type: ignore[arg-type]


@pytest.mark.parametrize("labels", ["card", b"card", {"card": 1}, 5, None])
def test_labels_must_be_a_list(labels: Any) -> None:
    """One string is not taken apart into letters; anything but a list is refused as a whole."""
    assert refused(labels).loc == ("labels",)


def test_the_location_can_be_another() -> None:
    """Callers say where their labels stand."""
    assert refused(["a", ""], loc=("body", "labels")).loc == ("body", "labels", 1)


@pytest.mark.parametrize("text", ["a", "x" * 10, "  a", "\u200b", "e\u0301", "\u202eabc", "\U0001f600", "שלום"])
def test_texts_that_are_let_through_unchanged(text: str) -> None:
    """Whatever can be encoded and is not white space is the caller's own business."""
    assert check_text(text, ("text",), 10) == text


@pytest.mark.parametrize("text", ["\udfff", "ok \ud83d", "\udc00 ok"])
def test_lone_surrogates(text: str) -> None:
    """A lone surrogate is no character: the error names its code and position."""
    with pytest.raises(InputError, match=r"U\+D[8-F][0-9A-F]{2} at position \d"):
        check_text(text, ("text",), 10)


@given(TEXTS, st.characters(categories=["Cs"]), TEXTS)
def test_any_text_with_a_lone_surrogate_is_refused(before: str, surrogate: str, after: str) -> None:
    """Wherever it stands; without it the text is let through as it is, unless it is blank or has a NUL."""
    text = before + surrogate + after
    with pytest.raises(InputError) as caught:
        check_text(text, ("text",), 100)
    if "\x00" not in text:
        assert f"U+{ord(surrogate):04X} at position {len(before)}, no character" in str(caught.value)
    rest = before + after
    if rest.strip() and "\x00" not in rest:
        assert check_text(rest, ("text",), 100) is rest


@given(TEXTS)
def test_twins_are_found_whatever_their_form(text: str) -> None:
    """A label and its NFD form never pass as two."""
    assume(text.strip() and "\x00" not in text)
    with pytest.raises(InputError, match="same label"):
        LabelSet.of([text, unicodedata.normalize("NFD", text) + " "])


@given(st.lists(TEXTS), st.randoms())
def test_hash_ignores_order_and_repetition(descriptions: list[str], random: Any) -> None:
    """Scores don't depend on the order of the candidates, so neither does the list's name."""
    shuffled = descriptions + descriptions[:2]
    random.shuffle(shuffled)
    assert list_hash(descriptions) == list_hash(shuffled)


@given(st.sets(TEXTS), st.sets(TEXTS))
def test_different_lists_have_different_hashes(first: set[str], second: set[str]) -> None:
    """Two lists share a hash only when they hold the same descriptions."""
    assert (list_hash(first) == list_hash(second)) == (first == second)


@given(st.lists(TEXTS, min_size=2, max_size=5), st.sampled_from(["", ",", "\x00", "\n", "|", "\x00\x00\x00\x00"]))
def test_joined_strings_never_collide(descriptions: list[str], separator: str) -> None:
    """A list and the string that joining it gives have different names."""
    joined = separator.join(sorted(set(descriptions)))
    assume({joined} != set(descriptions))
    assert list_hash(descriptions) != list_hash([joined])


def test_hash_is_stable() -> None:
    """Names of cached lists outlive this process, so the documented form is pinned, computed by hand."""
    from hashlib import sha256

    form = (1).to_bytes(8, "big") + b"a" + (2).to_bytes(8, "big") + "é".encode()
    assert list_hash(["é", "a"]) == sha256(form).hexdigest()
    assert label_hash("a") == sha256((1).to_bytes(8, "big") + b"a").hexdigest()


def test_normal_forms_are_hashed_as_sent() -> None:
    """The two forms of é are different tokens to a model, so their rows have different names."""
    assert label_hash("caf\u00e9") != label_hash("cafe\u0301")


DESCRIBED: list[Any] = [{"name": "b", "description": ["y", "x"]}, "a", {"name": "c", "description": "z"}]


def test_a_set_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are keyed by the set, so after it was made its labels are never hashed again."""
    labels, same = LabelSet.of(DESCRIBED), LabelSet.of(DESCRIBED)

    def refuse(label: Label) -> int:
        raise AssertionError(f"{label} was hashed again")

    monkeypatch.setattr(Label, "__hash__", refuse)
    assert {labels: "found"}[same] == "found"


def test_sets_of_other_labels_differ() -> None:
    """Equality is of labels in their order, whatever their hashes are."""
    assert LabelSet.of(["a", "b"]) != LabelSet.of(["b", "a"])
    assert LabelSet.of(["a", "b"]) == LabelSet.of([Label("a", ("a",)), {"name": "b"}])


def test_a_set_from_another_process_is_found() -> None:
    """Python's hashes differ from process to process, so a set that travels is hashed anew where it arrives."""
    program = (
        "import pickle, sys; from tokenalign import LabelSet; "
        "sys.stdout.buffer.write(pickle.dumps(LabelSet.of(['card payment', 'cash', 'naïve'])))"
    )
    sent = subprocess.run([sys.executable, "-X", "utf8", "-c", program], check=True, capture_output=True).stdout
    arrived = pickle.loads(sent)  # noqa: S301  the own program's
    own = LabelSet.of(["card payment", "cash", "naïve"])
    assert {own: "found"}[arrived] == "found"
    assert (arrived.descriptions, arrived.owners) == (own.descriptions, own.owners)


@given(st.permutations(DESCRIBED), st.booleans())
def test_the_id_ignores_order(labels: list[Any], swapped: bool) -> None:
    """Neither the order of the labels nor that of one label's descriptions changes a score, so neither the id."""
    if swapped:
        labels = [{**one, "description": ["x", "y"]} if one == DESCRIBED[0] else one for one in labels]
    assert label_set_id(LabelSet.of(labels)) == label_set_id(LabelSet.of(DESCRIBED))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["a", "b"], ["a", "c"]),
        (["a", "b"], ["a", "b", "c"]),
        (["a,b", "c"], ["a", "b,c"]),
        (["a", "b"], ["a", {"name": "b", "description": "x"}]),
        ([{"name": "a", "description": "x"}, "b"], [{"name": "c", "description": "x"}, "b"]),
        ([{"name": "a", "description": ["x", "y"]}, "b"], [{"name": "a", "description": "x"}, "y", "b"]),
        (["caf\u00e9", "b"], ["cafe\u0301", "b"]),
        (["a", "b"], ["a ", "b"]),
    ],
)
def test_different_sets_have_different_ids(first: list[Any], second: list[Any]) -> None:
    """Names, descriptions, and which name they belong to all count, as sent."""
    assert label_set_id(LabelSet.of(first)) != label_set_id(LabelSet.of(second))


def test_the_id_is_stable() -> None:
    """Ids are kept by callers for years, so the documented form is pinned, computed by hand."""
    from hashlib import sha256

    def counted(text: str) -> bytes:
        return len(text.encode()).to_bytes(8, "big") + text.encode()

    one, two = (1).to_bytes(8, "big"), (2).to_bytes(8, "big")
    form = b"label set\x00" + counted("a") + one + counted("a") + counted("é") + two + counted("x") + counted("y")
    labels = LabelSet.of([{"name": "é", "description": ["y", "x"]}, "a"])
    assert label_set_id(labels) == sha256(form).hexdigest()[:32]
