"""What a head has to beat: cosines of the encoder's own mean-pooled vectors, as sentence-transformers computes them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tokenalign.backbone import Backbone
from tokenalign.config import ModelConfig
from tokenalign.evaluation import FloatArray, cosine_similarities
from tokenalign.labels import LabelSet
from tokenalign.text import TextTokenizer
from tokenalign.tokens import TokenBatch
from tokenalign.training.features import Float32Array, mean_pooled
from tokenalign.training.recipes import BANKING_TEMPLATE
from tokenalign.training.rivals import best_description

RAW, TEMPLATED = "cosine, raw labels", "cosine, templated labels"
LABEL_WORDINGS = {RAW: "{label}", TEMPLATED: BANKING_TEMPLATE}
OWN_LABEL_WORDINGS = {RAW: "{label}", TEMPLATED: "This text is about {label}."}
CHUNK_TEXTS = 1_024


class CosineBaseline:
    """Scores texts against label words by the cosine of mean-pooled vectors; no training, no head."""

    def __init__(self, backbone: Backbone, folder: Path, config: ModelConfig, label_template: str) -> None:
        self._backbone = backbone
        templates = {"document_template": "{text}", "label_template": label_template}
        self._tokenizer = TextTokenizer.load(folder, config.model_copy(update=templates))

    def logits(self, texts: Sequence[str], labels: LabelSet) -> FloatArray:
        """`[texts, labels]` cosines; of several descriptions of a label the nearest counts."""
        return best_description(self.similarities(texts, labels.descriptions), labels)

    def similarities(self, texts: Sequence[str], labels: Sequence[str]) -> FloatArray:
        """`[texts, labels]` cosines."""
        documents = [
            self._vectors(self._tokenizer.documents(texts[start : start + CHUNK_TEXTS]).tokens)
            for start in range(0, len(texts), CHUNK_TEXTS)
        ]
        return cosine_similarities(np.concatenate(documents), self._vectors(self._tokenizer.labels(labels).tokens))

    def _vectors(self, ids: TokenBatch) -> Float32Array:
        return mean_pooled(ids.with_values(self._backbone.encode(ids).float().cpu().numpy()))
