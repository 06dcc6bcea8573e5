"""A four-layer Qwen3.5 with a cut vocabulary, at its full width: both kinds of head trained on it, one served."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tokenalign import TokenAlignClassifier
from tokenalign.cli import main
from tokenalign.linear import LinearClassifier
from tokenalign.training.own_run import LABELS_FILE

pytestmark = [pytest.mark.serve, pytest.mark.nightly, pytest.mark.timeout(1_200)]

ROWS = 39_866
PARAMETERS, FILE_BYTES = 120_639_808, 241_285_160  # as the model's card has them, weights in bf16
WORDS = {"card": "my card was declined", "cash": "the cash never came out", "fee": "why was a fee charged"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three labels of fifteen texts each."""
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    rows = [{"text": f"{text} {i} times", "label": label} for i in range(15) for label, text in WORDS.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The folder of the headless text model with random weights in bf16, and a byte-level tokenizer."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3_5TextConfig, Qwen3_5TextModel

    folder = tmp_path_factory.mktemp("four-layers")
    torch.manual_seed(4)
    config = Qwen3_5TextConfig(
        vocab_size=ROWS,
        hidden_size=1_024,
        intermediate_size=3_584,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
    )
    model = Qwen3_5TextModel(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS
    model.to(torch.bfloat16).save_pretrained(folder)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train([str(data)], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]  # it leaves them untyped
    tokenizer.save_pretrained(folder)
    return folder


def train(backbone: Path, data: Path, output: Path, *words: str) -> Path:
    options = ["--data", str(data), "--output", str(output), "--backbone", str(backbone), "--device", "cpu"]
    features = ["--feature-dir", str(output.parent / "features"), "--local-only", "--max-epochs", "2"]
    assert main(["train", *options, *features, *words]) == 0
    return output


def test_the_file_is_as_large_as_the_cards(backbone: Path) -> None:
    """To within its header, whose length depends on who wrote it."""
    size = (backbone / "model.safetensors").stat().st_size
    assert abs(size - FILE_BYTES) < 1_000
    assert "score" not in (backbone / "model.safetensors").read_bytes()[:20_000].decode("utf-8", "ignore")


def test_a_linear_head_is_trained_on_it_and_answers(backbone: Path, data: Path, tmp_path: Path) -> None:
    """By the last token of each window."""
    folder = train(backbone, data, tmp_path / "linear", "--head", "linear")
    classifier = LinearClassifier.from_pretrained(folder, device="cpu")
    assert (classifier.config.pooling, classifier.config.backbone_width) == ("last", 1_024)
    answer = classifier.classify("my card was declined " * 200)
    assert answer["label"] in WORDS
    assert answer["windows"]["count"] > 2


def test_an_alignment_head_is_trained_on_it_and_served(
    backbone: Path, data: Path, tmp_path: Path, launch: Any, project_config: Any, wait_until_ready: Any
) -> None:
    """Answers over HTTP are the library's."""
    folder = train(backbone, data, tmp_path / "alignment", "--split", "messages")
    labels = [json.loads(line)["name"] for line in (folder / LABELS_FILE).read_text().splitlines()]
    expected = TokenAlignClassifier.from_pretrained(folder, device="cpu")("the cash came late", labels)
    config = project_config()
    config["applications"][0]["args"]["model"] = {"id_or_path": str(folder), "device": "cpu"}
    with launch(config) as running:
        wait_until_ready(running)
        body = {"text": "the cash came late", "labels": labels}
        answer = httpx.post(f"{running.url}/v1/classify", json=body, timeout=120, trust_env=False).json()
    scores = {score["label"]: score["score"] for score in answer["results"][0]["scores"]}
    assert scores == pytest.approx(expected["scores"], abs=1e-3)
