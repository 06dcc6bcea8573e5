"""The linear classifier on tiny backbones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenalign.errors import CheckpointError, ConfigError, InputError
from tokenalign.linear import LinearClassifier

TEXTS = ["the card was declined", "cash", "payment not received twice"]
LONG = "card " * 8 + "cash " * 8 + "twice " * 8


def test_answers_are_a_linear_layer_on_the_pooled_states(multi_label: LinearClassifier) -> None:
    """Scores are sigmoids of weights times the mean state, plus the bias; labels those from the threshold on."""
    answer = multi_label.classify("cash", return_logits=True)
    tokens = multi_label.tokenizer.documents(["cash"]).tokens
    mean = multi_label.backbone.encode(tokens).mean(dim=0)
    weight, bias = multi_label.head.score.weight.detach(), multi_label.head.score.bias.detach()
    expected = dict(zip(multi_label.config.labels, (weight @ mean + bias).tolist(), strict=True))
    assert answer["logits"] == pytest.approx(expected, abs=1e-5)
    assert answer["scores"] == pytest.approx({k: 1 / (1 + np.exp(-v)) for k, v in expected.items()}, abs=1e-5)
    assert list(answer["scores"].values()) == sorted(answer["scores"].values(), reverse=True)
    assert answer["labels"] == [label for label, score in answer["scores"].items() if score >= 0.5]
    assert answer["truncation"] is None
    assert "windows" not in answer


def test_a_text_is_answered_alone_as_among_others(multi_label: LinearClassifier) -> None:
    """A string gives one answer, a list one each, in order."""
    together = multi_label.classify([LONG, *TEXTS])
    for text, answer in zip([LONG, *TEXTS], together, strict=True):
        alone = multi_label.classify(text)
        assert answer["labels"] == alone["labels"]
        assert answer["scores"] == pytest.approx(alone["scores"], abs=1e-5)
    assert multi_label.classify([]) == []


def test_a_long_text_is_read_in_windows(multi_label: LinearClassifier) -> None:
    """Nothing is cut: each label has the largest logit of its windows, and the answer says where they were."""
    answer = multi_label.classify(LONG, return_logits=True)
    report = answer["windows"]
    windows = [LONG[slice(*span)] for span in report["spans"]]
    assert report["count"] == len(windows) > 2
    assert windows[0].startswith("card")
    assert windows[-1].endswith("twice")
    assert report["spans"][1][0] == 8 * len("card ")  # the stride
    each = [multi_label.classify(window, return_logits=True)["logits"] for window in windows]
    largest = {label: max(logits[label] for logits in each) for label in multi_label.config.labels}
    assert answer["logits"] == pytest.approx(largest, abs=1e-5)
    best = max(largest, key=lambda label: largest[label])
    assert report["best"] == int(np.argmax([logits[best] for logits in each]))


def test_one_label_of_a_softmax(single_label: LinearClassifier) -> None:
    """Scores sum to one, and the best label is the answer, whatever its score."""
    for answer in single_label.classify(TEXTS):
        assert sum(answer["scores"].values()) == pytest.approx(1)
        assert answer["labels"] == [answer["label"]] == [next(iter(answer["scores"]))]


def test_a_threshold_of_the_callers_own(multi_label: LinearClassifier) -> None:
    """It takes the place of the head's; where no label reaches it the answer says so."""
    scores = multi_label.classify("cash")["scores"]
    best, second = list(scores.values())[:2]
    assert multi_label.classify("cash", threshold=second)["labels"] == list(scores)[:2]
    nothing = multi_label.classify("cash", threshold=1.0, top_k=1)
    assert (nothing["label"], nothing["labels"], len(nothing["scores"])) == (None, [], 1)
    assert nothing["abstained"] == {"reason": "min_score", "value": pytest.approx(best), "limit": 1.0}


def test_an_unstable_threshold_is_told_with_the_answers(make_linear: Any, bert_backbone: Path) -> None:
    """Until the caller brings one of their own."""
    choice = {"threshold": 0.3, "texts": 9, "resamples": 100, "low": 0.1, "high": 0.3, "lowest": 0.1, "highest": 0.4}
    classifier = LinearClassifier.from_pretrained(make_linear(bert_backbone, threshold=choice), device="cpu")
    (warning,) = classifier.classify("cash")["warnings"]
    assert (warning["loc"], warning["type"]) == (["threshold"], "unstable")
    assert "0.30 is unstable: 0.10 to 0.40 in 100 resamples" in warning["message"]
    assert classifier.classify("cash", threshold=0.3)["warnings"] == []


@pytest.mark.parametrize(
    ("texts", "options", "loc"),
    [
        (["fine", " "], {}, ("texts", 1)),
        ("\x00", {}, ("text",)),
        ("cash", {"threshold": 1.5}, ("threshold",)),
        ("cash", {"top_k": 0}, ("top_k",)),
        (["cash", "cash " * 2_000], {}, ("texts", 1)),
    ],
)
def test_what_is_not_accepted_is_named(
    multi_label: LinearClassifier, texts: Any, options: dict[str, Any], loc: tuple[str | int, ...]
) -> None:
    """By its place in what the caller sent."""
    with pytest.raises(InputError) as caught:
        multi_label.classify(texts, **options)
    assert caught.value.loc == loc


def test_a_softmax_has_no_threshold(single_label: LinearClassifier) -> None:
    """A caller who gives one is told so."""
    with pytest.raises(InputError, match='mode "single_label"'):
        single_label.classify("cash", threshold=0.5)


def test_saved_and_loaded_again_it_answers_the_same(multi_label: LinearClassifier, tmp_path: Path) -> None:
    """And has the same fingerprint, which other weights and another threshold change."""
    multi_label.save_pretrained(tmp_path)
    again = LinearClassifier.from_pretrained(tmp_path, device="cpu")
    assert again.classify(TEXTS) == multi_label.classify(TEXTS)
    assert again.fingerprint == multi_label.fingerprint
    weights = tmp_path / "model.safetensors"
    save_file({name: tensor * 2 for name, tensor in load_file(weights).items()}, weights)
    assert LinearClassifier.from_pretrained(tmp_path, device="cpu").fingerprint != multi_label.fingerprint


def test_weights_that_do_not_fit_are_refused(multi_label: LinearClassifier, tmp_path: Path) -> None:
    """By name and shape, and never NaN."""
    multi_label.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    good = load_file(weights)
    bad: dict[str, dict[str, torch.Tensor]] = {
        "score.bias is missing": {"score.weight": good["score.weight"]},
        "score.weight has shape": good | {"score.weight": good["score.weight"][:2].clone()},
        "head is unknown": good | {"head": torch.zeros(1)},
        "must hold finite": good | {"score.bias": good["score.bias"] * torch.nan},
    }
    for said, tensors in bad.items():
        save_file(tensors, weights)
        with pytest.raises(CheckpointError, match=said):
            LinearClassifier.from_pretrained(tmp_path, device="cpu")
    weights.write_bytes(b"short")
    with pytest.raises(CheckpointError, match="no whole safetensors"):
        LinearClassifier.from_pretrained(tmp_path, device="cpu")


def test_another_backbone_must_hash_the_same(make_linear: Any, bert_backbone: Path, tmp_path: Path) -> None:
    """The head was made for those weights."""
    head = make_linear(bert_backbone)
    other = tmp_path / "other"
    other.mkdir()
    for path in bert_backbone.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    assert LinearClassifier.from_pretrained(head, backbone=str(other), device="cpu").classify("cash")["scores"]
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, other / "model.safetensors")
    with pytest.raises(CheckpointError, match="sha256"):
        LinearClassifier.from_pretrained(head, backbone=str(other), device="cpu")


def test_a_stride_that_skips_tokens_is_refused(make_linear: Any, bert_backbone: Path) -> None:
    """Special tokens take two of the window's sixteen."""
    classifier = LinearClassifier.from_pretrained(make_linear(bert_backbone, stride=16), device="cpu")
    with pytest.raises(ConfigError, match="stride: 16 leaves gaps between windows, which hold 14 tokens"):
        classifier.classify("cash")
