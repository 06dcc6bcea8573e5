"""The cosine baseline, against sentence-transformers' own computation where it can be had."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tokenalign.training.baselines import LABEL_WORDINGS, CosineBaseline
from tokenalign.training.encoder import MINILM, Encoder, load_encoder
from tokenalign.training.recipes import BANKING_TEMPLATE

TEXTS = ["My card was charged twice!", "cash", "why is the payment not received yet"]
LABELS = ["card charged", "cash declined"]


def test_cosines_of_mean_pooled_vectors(encoder: Encoder, bert_backbone: Path) -> None:
    """Cosines equal transformers' last hidden states averaged over the attention mask, special tokens included."""
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(bert_backbone).eval(), AutoTokenizer.from_pretrained(bert_backbone)

    def vectors(texts: list[str]) -> torch.Tensor:
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        with torch.no_grad():
            states = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"][..., None]
        return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

    for wording in LABEL_WORDINGS.values():
        found = CosineBaseline(encoder.backbone, encoder.folder, encoder.config, wording).similarities(TEXTS, LABELS)
        expected = vectors(TEXTS) @ vectors([wording.format(label=label) for label in LABELS]).T
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


def test_the_heads_own_templates_do_not_matter(encoder: Encoder) -> None:
    """The baseline reads texts plainly, whatever the head puts them into."""
    config = encoder.config.model_copy(update={"document_template": "query: {text}", "label_template": "x {label}"})
    plain, templated = (
        CosineBaseline(encoder.backbone, encoder.folder, c, "{label}").similarities(TEXTS, LABELS)
        for c in (encoder.config, config)
    )
    np.testing.assert_array_equal(plain, templated)


def test_minilm_as_sentence_transformers_computes_it() -> None:
    """On the shipped encoder, cosines are those of sentence-transformers itself."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder = load_encoder(MINILM, name="tiny", label_template="{label}", device="cpu")
    theirs = sentence_transformers.SentenceTransformer(str(encoder.folder), device="cpu", local_files_only=True)
    expected = theirs.encode(TEXTS, show_progress_bar=False) @ theirs.encode(LABELS, show_progress_bar=False).T
    found = CosineBaseline(encoder.backbone, encoder.folder, encoder.config, "{label}").similarities(TEXTS, LABELS)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert BANKING_TEMPLATE in LABEL_WORDINGS.values()
