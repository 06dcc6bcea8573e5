"""The losses of distillation."""

import pytest
import torch

from tests.tokenalign.compression.models import THIN, qwen35_config
from tokenalign.compression.objective import layer_states, losses, padded, relative_error


def test_relative_error_by_a_loop() -> None:
    """The mean over tokens of squared difference by squared size; what the mask leaves out has no say."""
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, 4), torch.randn(2, 3, 4) * 100
    mask = torch.tensor([[True, True, False], [True, False, False]])
    expected = [
        float(((student[b, t] - teacher[b, t]) ** 2).sum() / (teacher[b, t] ** 2).sum())
        for b, t in ((0, 0), (0, 1), (1, 0))
    ]
    assert float(relative_error(student, teacher, mask)) == pytest.approx(sum(expected) / 3)


def test_interfaces_are_those_of_kept_layers() -> None:
    """What enters a kept layer is compared with what enters the teacher's layer that it was; the first is left out."""
    teacher = [torch.full((1, 1, 2), float(i + 1)) for i in range(6)]  # 5 layers, then the final states
    student = [torch.full((1, 1, 2), 9.0), teacher[3], teacher[5] * 2]
    found = losses(student, teacher, (1, 3), torch.ones(1, 1, dtype=torch.bool), 0.25)
    assert found.interface is not None
    assert (float(found.interface), float(found.final), float(found.total)) == (0, 1, 0.75)


def test_one_layer_has_no_interface() -> None:
    """Then the final states are all there is."""
    states = [torch.ones(1, 1, 2), torch.ones(1, 1, 2) * 3]
    found = losses(states, [torch.ones(1, 1, 2)] * 4, (1,), torch.ones(1, 1, dtype=torch.bool))
    assert found.interface is None
    assert found.total is found.final


def test_layer_states_are_what_enters_each_layer() -> None:
    """Seen from inside the model by hooks; the last are those after its norm."""
    from transformers import AutoModel

    torch.manual_seed(0)
    model = AutoModel.from_config(qwen35_config(4, 50, **THIN)).eval()
    seen = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    ids, mask = padded([[1, 2, 3, 4], [5, 6]], torch.device("cpu"))
    with torch.inference_mode():
        states = layer_states(model, ids, mask)
    assert len(states) == 5
    assert all(torch.equal(a, b) for a, b in zip(states, seen, strict=False))
    assert torch.equal(states[-1], model(ids, attention_mask=mask.long()).last_hidden_state)


def test_padding() -> None:
    """Ids on the left, the mask true where they are."""
    ids, mask = padded([[1, 2, 3], [4]], torch.device("cpu"))
    assert ids.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert mask.tolist() == [[True] * 3, [True, False, False]]
