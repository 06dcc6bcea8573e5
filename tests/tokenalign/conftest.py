"""Fixtures for the library's tests: loaded classifiers and tokenizers, once a session."""

from pathlib import Path

import pytest

from tokenalign.classifier import TokenAlignClassifier
from tokenalign.config import ModelConfig
from tokenalign.text import TextTokenizer

BACKBONES = ["bert", pytest.param("qwen3", marks=pytest.mark.data), pytest.param("qwen35", marks=pytest.mark.data)]


@pytest.fixture(scope="session")
def bert_classifier(bert_head: Path) -> TokenAlignClassifier:
    """A classifier on the tiny BERT; tests must leave its label cache as they like, and nothing else."""
    return TokenAlignClassifier.from_pretrained(bert_head, device="cpu")


@pytest.fixture(scope="session", params=BACKBONES)
def any_head(request: pytest.FixtureRequest) -> Path:
    """The folder of a head on each of the three kinds of backbone."""
    folder: Path = request.getfixturevalue(f"{request.param}_head")
    return folder


@pytest.fixture(scope="session", params=BACKBONES)
def any_backbone(request: pytest.FixtureRequest) -> Path:
    """The folder of each of the three kinds of backbone."""
    folder: Path = request.getfixturevalue(f"{request.param}_backbone")
    return folder


@pytest.fixture(scope="session")
def any_classifier(any_head: Path) -> TokenAlignClassifier:
    """A classifier on each of the three kinds of backbone."""
    return TokenAlignClassifier.from_pretrained(any_head, device="cpu")


@pytest.fixture(scope="session")
def bert_tokenizer(bert_classifier: TokenAlignClassifier) -> TextTokenizer:
    """The tiny BERT's tokenizer, without templates."""
    return bert_classifier.tokenizer


@pytest.fixture(scope="session", params=BACKBONES[:2])
def tokenizer_folder(request: pytest.FixtureRequest) -> Path:
    """The folder of a backbone with a WordPiece tokenizer and of one with a byte-level tokenizer."""
    folder: Path = request.getfixturevalue(f"{request.param}_backbone")
    return folder


@pytest.fixture(scope="session")
def any_tokenizer(tokenizer_folder: Path) -> TextTokenizer:
    """A WordPiece and a byte-level tokenizer, without templates, 128 tokens at most."""
    config = ModelConfig.parse({"backbone": {"reference": str(tokenizer_folder)}, "backbone_width": 32})
    return TextTokenizer.load(tokenizer_folder, config)
