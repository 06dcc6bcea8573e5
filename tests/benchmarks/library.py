"""The library in one process, measured: texts a second, times of single texts, GEMM peak, and its own answers.

python -m tests.benchmarks.library    # asked by the suite in JSON lines, see `children`
"""

import time
from typing import Any

import torch

from tests.benchmarks.children import answer_questions
from tests.benchmarks.flop_counts import EncoderShape, HeadShape, classification_flops
from tokenalign import TokenAlignClassifier
from tokenalign.backbone import DType
from tokenalign.labels import LabelSet

GEMM_SIZES = (512, 1_024, 2_048)


class Library:
    """One classifier at a time, and its measurements."""

    def __init__(self) -> None:
        self._classifier: TokenAlignClassifier | None = None

    def load(self, model: str | None = None, dtype: DType = "auto", threads: int | None = None) -> dict[str, Any]:
        """Loads a head with its encoder; what it computes with."""
        if threads is not None:
            torch.set_num_threads(threads)
        self._classifier = TokenAlignClassifier.from_pretrained(model, device="cpu", dtype=dtype)
        return {"threads": torch.get_num_threads(), "dtype": self._classifier.backbone.identity.dtype}

    def rate(self, texts: list[str], labels: list[str], batch: int) -> float:
        """Texts a second in calls of `batch` texts, the labels known beforehand."""
        classifier = self._known(labels)
        started = time.perf_counter()
        for start in range(0, len(texts), batch):
            classifier(texts[start : start + batch], labels)
        return len(texts) / (time.perf_counter() - started)

    def singles(self, texts: list[str], labels: list[str]) -> list[float]:
        """Seconds of a call with one text, for each text."""
        classifier = self._known(labels)
        found = []
        for text in texts:
            started = time.perf_counter()
            classifier(text, labels)
            found.append(time.perf_counter() - started)
        return found

    def bare_rate(self, texts: list[str], max_batch_tokens: int) -> float:
        """Texts a second of the encoder's batched forward passes alone, ids and batches ready."""
        classifier = self._loaded()
        tokens = classifier.tokenizer.documents(texts).tokens
        started = time.perf_counter()
        classifier.backbone.encode(tokens, max_batch_tokens=max_batch_tokens)
        return len(texts) / (time.perf_counter() - started)

    def flops(self, texts: list[str], labels: list[str]) -> float:
        """Floating-point operations that these texts need against known labels, padding left out."""
        classifier = self._loaded()
        config = classifier.backbone._model.config  # what no public name gives, and only a count needs
        documents = classifier.tokenizer.documents(texts).tokens
        described = classifier.tokenizer.labels(list(LabelSet.of(labels).descriptions)).tokens
        shape = EncoderShape.of(config.to_dict())
        head = HeadShape(
            classifier.backbone.width, classifier.config.width, classifier.config.ffn_width, classifier.config.blocks
        )
        lengths = [int(n) for n in documents.lengths]
        kept = [int(n) for n in documents.kept().lengths]
        return classification_flops(shape, head, lengths, kept, int(described.kept().lengths.sum()))

    def gemm(self, dtype: str, stretches: int = 6, seconds: float = 0.1) -> dict[str, float]:
        """FLOP/s of square matrix products by size: of several stretches of time the best, for a peak is asked for."""
        kind = getattr(torch, dtype)
        found = {}
        for size in GEMM_SIZES:
            a, b = torch.randn(size, size).to(kind), torch.randn(size, size).to(kind)
            out = torch.empty(size, size, dtype=kind)
            torch.mm(a, b, out=out)
            best = 0.0
            for _ in range(stretches):
                count, started = 0, time.perf_counter()
                while (elapsed := time.perf_counter() - started) < seconds or not count:
                    torch.mm(a, b, out=out)
                    count += 1
                best = max(best, count / elapsed)
            found[str(size)] = 2.0 * size**3 * best
        return found

    def answers(self, texts: list[str], labels: list[str], batch: int = 256) -> list[dict[str, Any]]:
        """The top label and the score of every label, in the labels' order, for each text."""
        classifier = self._known(labels)
        found = []
        for start in range(0, len(texts), batch):
            for result in classifier(texts[start : start + batch], labels):
                found.append({"label": result["label"], "scores": [result["scores"][label] for label in labels]})
        return found

    def _known(self, labels: list[str]) -> TokenAlignClassifier:
        classifier = self._loaded()
        classifier("what a first call sets up is not the point", labels)
        return classifier

    def _loaded(self) -> TokenAlignClassifier:
        if self._classifier is None:
            raise RuntimeError("no model is loaded; ask for load first")
        return self._classifier


if __name__ == "__main__":
    measured = Library()
    names = ("load", "rate", "singles", "bare_rate", "flops", "gemm", "answers")
    with torch.inference_mode():
        answer_questions({name: getattr(measured, name) for name in names})
