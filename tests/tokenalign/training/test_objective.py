"""The loss: rows as in inference, and its terms against slow definitions."""

import numpy as np
import pytest
import torch

from tokenalign.head import AlignmentHead
from tokenalign.training.encoder import Encoder
from tokenalign.training.features import as_tensor
from tokenalign.training.material import Material
from tokenalign.training.objective import other_texts_loss, scored_rows, teacher_loss


@pytest.fixture
def head(encoder: Encoder) -> AlignmentHead:
    """A random head on the tiny BERT."""
    torch.manual_seed(0)
    return AlignmentHead(encoder.config).eval()


def test_training_rows_are_the_served_rows(head: AlignmentHead, material: Material) -> None:
    """Without dropout, the rows that are trained on are those that are scored in use, in the same order."""
    batch = material.messages.select(np.array([5, 0, 60, 3, 82, 7]))
    states = as_tensor(batch, torch.device("cpu"))
    with torch.no_grad():
        served = head.contextualize_ragged(batch.with_values(head.project(states).numpy()))
        torch.testing.assert_close(scored_rows(head, states, batch), served, atol=1e-5, rtol=1e-5)


def test_other_texts_loss_by_hand() -> None:
    """Rows and columns share the loss; a document matched with itself and rows without a positive count for nothing."""
    logits = torch.tensor([[1.0, 2.0, 0.5], [0.3, -1.0, 4.0]])
    positive = torch.tensor([[True, False, True], [False, False, True]])
    same = torch.tensor([[False, False, False], [False, False, True]])
    row = -np.log((np.exp(1) + np.exp(0.5)) / (np.exp(1) + np.exp(2) + np.exp(0.5)))
    columns = [-np.log(np.exp(1) / (np.exp(1) + np.exp(0.3))), 0.0]  # column 2 has one document left, the right one
    expected = 0.5 * row + 0.5 * np.mean(columns)
    assert float(other_texts_loss(logits, positive, same)) == pytest.approx(expected, rel=1e-5)


def test_other_texts_loss_without_any_positive() -> None:
    """Where no text is of a document's label the loss is 0, not NaN."""
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert float(other_texts_loss(torch.randn(2, 3), nothing, nothing)) == 0


def test_teacher_loss_is_a_divergence() -> None:
    """It is 0 for the teacher's own distribution, at any offset, and the KL divergence otherwise."""
    teacher = torch.randn(4, 5)
    assert float(teacher_loss(teacher + 3, teacher)) == pytest.approx(0, abs=1e-6)
    logits = torch.randn(4, 5)
    p, q = teacher.softmax(1), logits.softmax(1)
    assert float(teacher_loss(logits, teacher)) == pytest.approx(float((p * (p / q).log()).sum(1).mean()), rel=1e-5)
