"""The classifier as a user meets it: one call, honest answers, and errors that name what is wrong."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenalign
from tokenalign.classifier import CACHED_LISTS, CHUNK_TEXTS, MAX_TEXT_CHARS, TokenAlignClassifier
from tokenalign.config import ModelConfig
from tokenalign.errors import BackboneError, CheckpointError, ConfigError, InputError
from tokenalign.labels import Label, LabelSet

LABELS = ["card payment", "cash declined", "not received"]
TEXTS = [
    "I was charged twice for the same card payment.",
    "cash",
    "???",
    "naïve cafe\u0301 — $5 + 3%",
    "שלום עולם",
    "日本語",
    "😀👍🏽",
    "the card was not received " * 3,
    "[SEP] <think> <|endoftext|>",
    "card " * 200,
]


@pytest.fixture
def classifier(bert_classifier: TokenAlignClassifier) -> TokenAlignClassifier:
    """The tiny BERT with nothing kept."""
    bert_classifier.clear_label_cache()
    return bert_classifier


def logits_of(answer: Any) -> dict[str, float]:
    found: dict[str, float] = answer["logits"]
    return found


def close(first: dict[str, float], second: dict[str, float], tolerance: float = 1e-4) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert second[name] == pytest.approx(value, abs=tolerance)


def test_it_is_the_packages_public_name() -> None:
    """`from tokenalign import TokenAlignClassifier` works, and an unknown name is an AttributeError."""
    assert tokenalign.TokenAlignClassifier is TokenAlignClassifier
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = tokenalign.nothing_here


def test_a_string_gives_one_answer_and_a_list_a_list(any_classifier: TokenAlignClassifier) -> None:
    """In order, one for each text, whatever the backbone."""
    one = any_classifier("card", LABELS)
    assert one["label"] in LABELS
    assert set(one["scores"]) == set(LABELS)
    assert sum(one["scores"].values()) == pytest.approx(1, abs=1e-6)
    assert list(one["scores"].values()) == sorted(one["scores"].values(), reverse=True)
    many = any_classifier(["card", "cash"], LABELS)
    assert len(many) == 2
    close(many[0]["scores"], one["scores"])
    assert any_classifier([], LABELS) == []
    assert any_classifier(("card",), LABELS)[0]["label"] == one["label"]


def test_batch_is_text_by_text(any_classifier: TokenAlignClassifier) -> None:
    """A text scores the same alone and among others, in groups of any size."""
    together = any_classifier(TEXTS, LABELS, return_logits=True, explain="all")
    small = any_classifier(TEXTS, LABELS, return_logits=True, max_batch_tokens=1)
    for text, answer, other in zip(TEXTS, together, small, strict=True):
        alone = any_classifier(text, LABELS, return_logits=True, explain="all")
        close(logits_of(alone), logits_of(answer))
        close(logits_of(alone), logits_of(other))
        assert alone["truncation"] == answer["truncation"] == other["truncation"]
        assert len(alone["matches"]) == len(answer["matches"])


def test_logits_do_not_depend_on_the_other_candidates(any_classifier: TokenAlignClassifier) -> None:
    """Only the softmax does."""
    few = any_classifier("card twice", LABELS[:1], return_logits=True)
    many = any_classifier("card twice", [*LABELS, "something else", "x" * 40], return_logits=True)
    assert logits_of(many)[LABELS[0]] == pytest.approx(logits_of(few)[LABELS[0]], abs=1e-4)
    assert few["score"] == 1.0
    assert many["scores"][LABELS[0]] < 1


def test_permuted_labels_have_the_same_scores(classifier: TokenAlignClassifier) -> None:
    """The order of the candidates decides ties alone."""
    close(classifier("card", LABELS)["scores"], classifier("card", LABELS[::-1])["scores"], 1e-6)


def test_equal_texts_have_equal_answers(classifier: TokenAlignClassifier) -> None:
    """Also when they are scored once and lie in different chunks."""
    texts = ["card", "cash", "card", *[f"x{i}" for i in range(CHUNK_TEXTS)], "card"]
    answers = classifier(texts, LABELS)
    assert len(answers) == len(texts)
    assert answers[0] == answers[2]
    close(answers[0]["scores"], answers[-1]["scores"])
    assert answers[1] != answers[0]


def test_labels_of_every_form(classifier: TokenAlignClassifier) -> None:
    """Strings, mappings, Label objects, a LabelSet, a generator: names come back as sent."""
    mixed: list[Any] = [
        "card",
        {"name": "Cash ", "description": ["cash declined", "no cash"]},
        Label("n", ("not received",)),
    ]
    answer = classifier("cash", mixed)
    assert set(answer["scores"]) == {"card", "Cash ", "n"}
    assert classifier("cash", LabelSet.of(mixed)) == answer
    assert classifier("cash", (label for label in mixed)) == answer


def test_several_descriptions_count_as_their_best(classifier: TokenAlignClassifier) -> None:
    """The label's logit is the largest of what its descriptions would have alone."""
    together = classifier(
        "cash twice", [{"name": "a", "description": LABELS}, "other"], return_logits=True, explain="all"
    )
    alone = logits_of(classifier("cash twice", LABELS, return_logits=True))
    assert logits_of(together)["a"] == pytest.approx(max(alone.values()), abs=1e-4)
    best = max(alone, key=alone.__getitem__)
    tokens = [match["token"] for match in together["matches"] if match["label"] == "a"]
    assert tokens == best.split()


@pytest.mark.parametrize("explain", [True, "all"])
@pytest.mark.parametrize("text", TEXTS)
def test_matches_explain_the_logits(any_classifier: TokenAlignClassifier, text: str, explain: Any) -> None:
    """Contributions of a label sum to its logit; spans are code points of both texts, and the words are there."""
    descriptions = {"a": "card payment, twice", "b": "cafe\u0301 日本"}
    labels = [{"name": name, "description": d} for name, d in descriptions.items()]
    answer = any_classifier(text, labels, explain=explain, return_logits=True)
    explained = dict.fromkeys(match["label"] for match in answer["matches"])
    assert list(explained) == ([answer["label"]] if explain is True else list(answer["scores"]))
    for name in explained:
        found = [match for match in answer["matches"] if match["label"] == name]
        assert sum(match["contribution"] for match in found) == pytest.approx(logits_of(answer)[name], abs=1e-4)
        for match in found:
            assert match["text"] == text[slice(*match["span"])]
            assert match["text"]
            assert match["token"] == descriptions[name][slice(*match["label_span"])]
            assert match["token"]
            assert -1.001 <= match["similarity"] <= 1.001


def test_what_is_not_asked_for_is_absent(classifier: TokenAlignClassifier) -> None:
    """No matches and no logits by default; truncation and warnings are always there."""
    assert classifier("card", LABELS).keys() == {"label", "score", "scores", "truncation", "warnings"}


def test_top_k_shortens_the_list_only(classifier: TokenAlignClassifier) -> None:
    """Scores are over all candidates still; matches of "all" are those of the labels returned."""
    whole = classifier("card", LABELS)
    short = classifier("card", LABELS, top_k=2, return_logits=True, explain="all")
    assert list(short["scores"].items()) == list(whole["scores"].items())[:2]
    assert list(short["logits"]) == list(short["scores"])
    assert {match["label"] for match in short["matches"]} == set(short["scores"])
    assert classifier("card", LABELS, top_k=99) == whole


@pytest.mark.parametrize("count", [127, 128, 129])
def test_truncation_is_reported(classifier: TokenAlignClassifier, count: int) -> None:
    """Of 129 tokens 128 were used, and the answer says from where on nothing was seen; 127 and 128 are whole."""
    text = " ".join(["card"] * (count - 2))
    answer = classifier(text, LABELS)
    if count <= 128:
        assert answer["truncation"] is None
    else:
        assert answer["truncation"] == {"tokens": 129, "used": 128, "cut_at": text.rindex("card")}


def test_what_was_cut_has_no_say(classifier: TokenAlignClassifier) -> None:
    """Two texts that differ behind the cut score the same."""
    start = "card " * 126
    first, second = classifier([start + "cash", start + "twice received"], LABELS)
    assert first["scores"] == second["scores"]


def test_warning_of_a_cut_label(classifier: TokenAlignClassifier) -> None:
    """A label is never cut without a word; the warning names the label and how much was used."""
    (warning,) = classifier("card", ["cash", "card " * 130])["warnings"]
    assert (warning["loc"], warning["type"]) == (["labels", 1], "truncated")
    assert "132 tokens, 128 were used" in warning["message"]


def test_warning_of_labels_that_tie(classifier: TokenAlignClassifier) -> None:
    """Labels whose ids are equal are told, and tie exactly, in the caller's order."""
    answers = classifier(["card", "cash"], ["日本", "cash", "中国"])
    for answer in answers:
        (warning,) = answer["warnings"]
        assert (warning["loc"], warning["type"]) == (["labels", 2], "indistinguishable")
        assert answer["scores"]["日本"] == answer["scores"]["中国"]
        names = list(answer["scores"])
        assert names.index("日本") < names.index("中国")


@pytest.mark.parametrize(
    ("texts", "loc", "word"),
    [
        ("", ("text",), "empty"),
        (" \n", ("text",), "empty"),
        ("\u200b", ("text",), "no character that the tokenizer can read"),
        ("a\x00", ("text",), "NUL"),
        ("a\ud800", ("text",), "surrogate"),
        ("a" * (MAX_TEXT_CHARS + 1), ("text",), "100,001 characters, at most 100,000"),
        (["card", ""], ("texts", 1), "empty"),
        (["card", "cash", "\u200b"], ("texts", 2), "no character"),
        (["card", "card", "\u200b", "\u200b"], ("texts", 2), "no character"),
        (["card"] * (CHUNK_TEXTS + 3) + ["\u200b"], ("texts", CHUNK_TEXTS + 3), "no character"),
        (["\u200b", *(f"x{i}" for i in range(9))], ("texts", 0), "no character"),
        (["card", 3], ("texts", 1), "string, not int"),
        ([None], ("texts", 0), "string, not NoneType"),
        ([["card"]], ("texts", 0), "string, not list"),
        (None, ("texts",), "must be a string or a list"),
        (3, ("texts",), "must be a string or a list"),
        (b"card", ("texts",), "bytes"),
        ({"text": "card"}, ("texts",), "dict"),
    ],
)
def test_bad_texts(classifier: TokenAlignClassifier, texts: Any, loc: tuple[str | int, ...], word: str) -> None:
    """Each is refused, and where several texts are given, the first one at fault is named."""
    with pytest.raises(InputError, match=word) as caught:
        classifier(texts, LABELS)
    assert caught.value.loc == loc


@pytest.mark.parametrize(
    ("labels", "loc"),
    [
        ([], ("labels",)),
        (["only"], ("labels",)),
        ("card", ("labels",)),
        (None, ("labels",)),
        (LabelSet.of(["only"], min_labels=1), ("labels",)),
        (["a", ""], ("labels", 1)),
        (["a", "a "], ("labels", 1)),
        (["caf\u00e9", "cafe\u0301"], ("labels", 1)),
        (["a", "\ud800"], ("labels", 1)),
        (["a", "b\x00"], ("labels", 1)),
        (["a", "\u200b"], ("labels", 1)),
        (["a", {"name": "b", "description": ["x", "\u200b"]}], ("labels", 1, "description", 1)),
        ([{"name": "a", "description": ["x", "y"]}, "\u200b"], ("labels", 1)),
        (["a", 3], ("labels", 1)),
        ([f"label {i}" for i in range(2_049)], ("labels",)),
    ],
)
def test_bad_labels(classifier: TokenAlignClassifier, labels: Any, loc: tuple[str | int, ...]) -> None:
    """Each is refused at the very label, before any text is looked at."""
    with pytest.raises(InputError) as caught:
        classifier("card", labels)
    assert caught.value.loc == loc


@pytest.mark.parametrize(("option", "value"), [("top_k", 0), ("top_k", "1"), ("explain", "best"), ("explain", 1)])
def test_bad_options(classifier: TokenAlignClassifier, option: str, value: Any) -> None:
    """The option is named."""
    with pytest.raises(InputError) as caught:
        classifier("card", LABELS, **{option: value})
    assert caught.value.loc == (option,)


def test_a_text_at_the_limit(classifier: TokenAlignClassifier) -> None:
    """100,000 characters are read, and the cut is reported."""
    answer = classifier("card " * (MAX_TEXT_CHARS // 5), LABELS)
    assert answer["truncation"] == {"tokens": 20_002, "used": 128, "cut_at": 630}


def test_a_thousand_labels(classifier: TokenAlignClassifier) -> None:
    """Every one has its score, and they sum to one."""
    labels = [f"label {i}" for i in range(1_000)]
    scores = classifier("card 17", labels)["scores"]
    assert set(scores) == set(labels)
    assert sum(scores.values()) == pytest.approx(1, abs=1e-5)


class Counted:
    """Counts how many batches a classifier's encoder gets."""

    def __init__(self, classifier: TokenAlignClassifier, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches = 0
        encode = classifier.backbone.encode

        def counted(*arguments: Any, **options: Any) -> Any:
            self.batches += 1
            return encode(*arguments, **options)

        monkeypatch.setattr(classifier.backbone, "encode", counted)


def test_eight_candidate_lists_are_kept(classifier: TokenAlignClassifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list is encoded once; the ninth evicts the one that was used longest ago; clearing forgets all."""
    counted = Counted(classifier, monkeypatch)
    lists = [[f"{i}", "x"] for i in range(CACHED_LISTS + 1)]

    def encoded(labels: list[str]) -> bool:
        before = counted.batches
        classifier("card", labels)
        return counted.batches - before == 2

    assert CACHED_LISTS == 8
    assert all(encoded(labels) for labels in lists[:8])
    assert not any(encoded(labels) for labels in lists[:8])
    assert not encoded(lists[0])
    assert encoded(lists[8])
    assert not encoded(lists[0])
    assert encoded(lists[1])
    classifier.clear_label_cache()
    assert encoded(lists[0])


def test_kept_labels_are_of_the_wording_not_the_names(
    classifier: TokenAlignClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other names or another grouping of the same descriptions reuse the rows, and get their own answer."""
    plain = classifier("card", ["card", "cash", "twice"], return_logits=True)
    counted = Counted(classifier, monkeypatch)
    grouped = classifier(
        "card",
        [{"name": "a", "description": ["card", "cash"]}, {"name": "b", "description": "twice"}],
        return_logits=True,
    )
    assert counted.batches == 1
    assert logits_of(grouped) == {
        "a": max(logits_of(plain)["card"], logits_of(plain)["cash"]),
        "b": logits_of(plain)["twice"],
    }


def test_save_and_load_give_equal_scores(any_classifier: TokenAlignClassifier, tmp_path: Path) -> None:
    """A saved head scores as the one in memory and has its fingerprint."""
    any_classifier.save_pretrained(tmp_path / "new" / "head")
    copy = TokenAlignClassifier.from_pretrained(tmp_path / "new" / "head", device="cpu")
    assert copy.fingerprint == any_classifier.fingerprint
    for got, expected in zip(copy(TEXTS, LABELS), any_classifier(TEXTS, LABELS), strict=True):
        close(got["scores"], expected["scores"], 1e-6)


def test_a_head_beside_its_backbone_is_found_from_where_it_is_saved(
    bert_backbone: Path, make_head: Any, tmp_path: Path
) -> None:
    """A folder that is relative to the head's own is written so that the copy finds it."""
    head = make_head(bert_backbone, backbone={"reference": "encoder"})
    (head / "encoder").symlink_to(bert_backbone)
    beside = TokenAlignClassifier.from_pretrained(head, device="cpu")
    beside.save_pretrained(tmp_path / "elsewhere")
    copy = TokenAlignClassifier.from_pretrained(tmp_path / "elsewhere", device="cpu")
    assert copy("card", LABELS) == beside("card", LABELS)


def test_fingerprint_follows_whatever_scores_depend_on(bert_backbone: Path, make_head: Any) -> None:
    """Weights, temperature, templates, length and dtype each give another one; the name does not."""

    def fingerprint(dtype: Any = "float32", **changes: Any) -> str:
        folder = make_head(bert_backbone, **changes)
        return TokenAlignClassifier.from_pretrained(folder, device="cpu", dtype=dtype).fingerprint

    same = fingerprint()
    assert fingerprint(name="other") == same
    others = [
        fingerprint(seed=1),
        fingerprint(temperature=2.0),
        fingerprint(document_template="a {text}"),
        fingerprint(label_template="a {label}"),
        fingerprint(max_length=64),
        fingerprint(multi_label={"scale": 1.0, "bias": 0.0}),
        fingerprint(dtype="bfloat16"),
    ]
    assert len({same, *others}) == 8


def test_temperature_divides_the_logits(bert_backbone: Path, make_head: Any) -> None:
    """Twice the temperature, half the logits."""
    warm, hot = (
        TokenAlignClassifier.from_pretrained(make_head(bert_backbone, temperature=t), device="cpu")(
            "card", LABELS, return_logits=True
        )
        for t in (1.0, 2.0)
    )
    close({k: v / 2 for k, v in logits_of(warm).items()}, logits_of(hot), 1e-5)


def test_multi_label_scores_are_independent(bert_backbone: Path, make_head: Any) -> None:
    """Each is what the calibration makes of its logit, also for one label alone; logits and order stay."""
    head = make_head(bert_backbone, multi_label={"scale": 0.5, "bias": -1.0})
    fitted = TokenAlignClassifier.from_pretrained(head, device="cpu")
    answer = fitted("card twice", LABELS, multi_label=True, return_logits=True)
    for name, logit in answer["logits"].items():
        assert answer["scores"][name] == pytest.approx(1 / (1 + np.exp(1 - 0.5 * logit)), abs=1e-6)
    plain = fitted("card twice", LABELS, return_logits=True)
    assert plain["logits"] == answer["logits"]
    assert sum(plain["scores"].values()) == pytest.approx(1, abs=1e-6)
    alone = fitted("card twice", LABELS[:1], multi_label=True)
    assert alone["score"] == pytest.approx(answer["scores"][LABELS[0]], abs=1e-5)


def test_multi_label_without_a_calibration(classifier: TokenAlignClassifier) -> None:
    """The model that has none says so, and how to fit one."""
    with pytest.raises(InputError, match="tokenalign calibrate FOLDER") as caught:
        classifier("card", LABELS, multi_label=True)
    assert caught.value.loc == ("multi_label",)


def test_half_precision_scores_are_near(bert_head: Path, classifier: TokenAlignClassifier) -> None:
    """bfloat16 rounds, it does not change the answer's nature."""
    half = TokenAlignClassifier.from_pretrained(bert_head, device="cpu", dtype="bfloat16")
    for got, expected in zip(half(TEXTS, LABELS), classifier(TEXTS, LABELS), strict=True):
        close(got["scores"], expected["scores"], 0.1)


def test_a_backbone_from_elsewhere(bert_head: Path, bert_backbone: Path, make_head: Any, tmp_path: Path) -> None:
    """`backbone=` takes the encoder from another folder; an expected sha256 stays in force."""
    missing = make_head(bert_backbone, backbone={"reference": "./gone"})
    with pytest.raises(BackboneError, match=r"\./gone"):
        TokenAlignClassifier.from_pretrained(missing, device="cpu")
    moved = TokenAlignClassifier.from_pretrained(missing, device="cpu", backbone=str(bert_backbone))
    reference = TokenAlignClassifier.from_pretrained(bert_head, device="cpu")
    assert moved("card", LABELS) == reference("card", LABELS)
    pinned = make_head(bert_backbone, backbone={"reference": "./gone", "sha256": "0" * 64})
    with pytest.raises(CheckpointError, match="was expected"):
        TokenAlignClassifier.from_pretrained(pinned, device="cpu", backbone=str(bert_backbone))


@pytest.mark.parametrize("name", ["./missing", "no-such-head", "a/b/c"])
def test_a_head_that_is_not_there(name: str) -> None:
    """The error names it and lists the shipped ones."""
    with pytest.raises(CheckpointError, match="is no folder here"):
        TokenAlignClassifier.from_pretrained(name, local_files_only=True)


def test_an_unknown_config_key(bert_head: Path, tmp_path: Path) -> None:
    """The key is named before anything is loaded."""
    config = ModelConfig.load(bert_head / "config.json").model_dump() | {"temprature": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((bert_head / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match="temprature: unknown key"):
        TokenAlignClassifier.from_pretrained(tmp_path, device="cpu")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_head_file(bert_head: Path, tmp_path: Path, name: str) -> None:
    """The file is named."""
    for other in {"config.json", "model.safetensors"} - {name}:
        (tmp_path / other).write_bytes((bert_head / other).read_bytes())
    with pytest.raises((ConfigError, CheckpointError), match=name.replace(".", r"\.")):
        TokenAlignClassifier.from_pretrained(tmp_path, device="cpu")


def test_tensors_that_do_not_fit(bert_head: Path, tmp_path: Path) -> None:
    """A head whose configuration says other widths lists what differs."""
    config = ModelConfig.load(bert_head / "config.json").model_dump() | {"ffn_width": 80, "blocks": 3}
    ModelConfig.parse(config).save(tmp_path / "config.json")
    (tmp_path / "model.safetensors").write_bytes((bert_head / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError) as caught:
        TokenAlignClassifier.from_pretrained(tmp_path, device="cpu")
    assert "blocks.2" in str(caught.value)
    assert "is missing" in str(caught.value)


def test_scores_are_plain_numbers(classifier: TokenAlignClassifier) -> None:
    """An answer can be written as JSON as it is."""
    answer = classifier("card " * 200, ["日本", "中国", "cash"], explain="all", return_logits=True)
    assert json.loads(json.dumps(answer)) == answer
    assert not any(isinstance(value, np.generic) for value in answer["scores"].values())
