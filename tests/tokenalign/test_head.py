"""The head against an independent reference that follows the model card step by step, in numpy and fp64."""

from math import erf

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tokenalign.config import ModelConfig
from tokenalign.head import AlignmentHead
from tokenalign.tokens import TokenBatch

Array = NDArray[np.float64]
D, WIDTH, HEADS, FFN, BLOCKS = 24, 16, 4, 40, 2


def config(**changes: int) -> ModelConfig:
    values = {"backbone_width": D, "width": WIDTH, "heads": HEADS, "ffn_width": FFN, "blocks": BLOCKS}
    return ModelConfig.parse({"backbone": {"reference": "none"}} | values | changes)


@pytest.fixture(scope="module")
def head() -> AlignmentHead:
    """A head whose every parameter is away from its neutral start, so that none can be forgotten unseen."""
    torch.manual_seed(0)
    module = AlignmentHead(config())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module.eval()


def reference_norm(x: Array) -> Array:
    mean = x.mean(axis=-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=-1, keepdims=True)
    return np.asarray((x - mean) / np.sqrt(variance + 1e-5))


def reference_gelu(x: Array) -> Array:
    return np.asarray(x * 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2))))


def reference_projection(p: dict[str, Array], states: Array) -> Array:
    """Step 3: normalise, weight and bias per channel, project; `[tokens, D] -> [tokens, width]`."""
    normal = reference_norm(states) * p["input.weight"] + p["input.bias"]
    return np.asarray(np.einsum("td,wd->tw", normal, p["input.linear.weight"]))


def reference_block(p: dict[str, Array], name: str, x: Array) -> Array:
    """Step 4 for one sequence without padding: attention head by head, token by token, then the FFN."""
    normal = reference_norm(x) * p[f"{name}.attention_norm.weight"] + p[f"{name}.attention_norm.bias"]
    query, key, value = (np.einsum("td,wd->tw", normal, p[f"{name}.{r}.weight"]) for r in ("query", "key", "value"))
    attended = np.zeros_like(x)
    size = WIDTH // HEADS
    for h in range(HEADS):
        part = slice(h * size, (h + 1) * size)
        for i in range(len(x)):
            scores = np.array([query[i, part] @ key[j, part] / np.sqrt(size) for j in range(len(x))])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            for j in range(len(x)):
                attended[i, part] += weights[j] * value[j, part]
    x = x + np.einsum("td,wd->tw", attended, p[f"{name}.output.weight"])
    normal = reference_norm(x) * p[f"{name}.ffn_norm.weight"] + p[f"{name}.ffn_norm.bias"]
    inner = reference_gelu(np.einsum("td,fd->tf", normal, p[f"{name}.ffn_in.weight"]) + p[f"{name}.ffn_in.bias"])
    return np.asarray(x + np.einsum("tf,wf->tw", inner, p[f"{name}.ffn_out.weight"]) + p[f"{name}.ffn_out.bias"])


def reference_rows(p: dict[str, Array], states: Array, side: str) -> Array:
    """Steps 3 to 5 for one sequence: unit rows of the label ("query") or document ("key") side."""
    x = reference_projection(p, states)
    for block in range(BLOCKS):
        x = reference_block(p, f"blocks.{block}", x)
    rows = np.einsum("td,wd->tw", x, p[f"{side}.weight"])
    return np.asarray(rows / np.sqrt((rows**2).sum(axis=-1, keepdims=True)))


def parameters_of(head: AlignmentHead) -> dict[str, Array]:
    return {name: tensor.double().numpy() for name, tensor in head.state_dict().items()}


def ragged(head: AlignmentHead, states: list[Array], keep: list[list[bool]]) -> TokenBatch:
    """The projected rows of several sequences, as the product makes them."""
    rows = head.project(torch.from_numpy(np.concatenate(states)).float()).detach().numpy()
    lengths = np.array([len(s) for s in states], dtype=np.int32)
    return TokenBatch(rows, lengths, np.array([flag for flags in keep for flag in flags], dtype=np.bool_))


def random_states(*lengths: int) -> list[Array]:
    rng = np.random.default_rng(7)
    return [rng.normal(size=(n, D)) for n in lengths]


def test_parameter_count_at_the_released_width() -> None:
    """On Qwen3-1.7B the head has exactly the 2,236,929 parameters that the card states."""
    released = config(backbone_width=2_048, width=256, heads=4, ffn_width=1_024, blocks=2)
    assert sum(p.numel() for p in AlignmentHead(released).parameters()) == 2_236_929


def test_projection_is_the_cards(head: AlignmentHead) -> None:
    """LayerNorm without affine, weight and bias, linear without bias."""
    states = random_states(9)[0]
    got = head.project(torch.from_numpy(states).float()).detach().numpy()
    np.testing.assert_allclose(got, reference_projection(parameters_of(head), states), atol=1e-5)


@pytest.mark.parametrize("side", ["query", "key"])
def test_rows_are_the_cards(head: AlignmentHead, side: str) -> None:
    """Every sequence of a ragged batch gets what the reference computes for it alone, kept tokens in order."""
    states = random_states(5, 1, 12, 3)
    keep = [[True, False, True, True, False], [True], [i % 3 > 0 for i in range(12)], [False, True, True]]
    contextual = head.contextualize_ragged(ragged(head, states, keep))
    rows = {"query": head.queries, "key": head.keys}[side](contextual).detach().numpy()
    p = parameters_of(head)
    expected = [reference_rows(p, s, side)[np.array(flags)] for s, flags in zip(states, keep, strict=True)]
    np.testing.assert_allclose(rows, np.concatenate(expected), atol=1e-5)


def test_padding_changes_nothing(head: AlignmentHead) -> None:
    """Whatever stands in the padding and however long it is, a sequence's rows stay."""
    rows = torch.randn(1, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    alone = head.contextualize(rows, torch.ones(1, 6, dtype=torch.bool))
    padded = torch.full((3, 20, WIDTH), 1e3)
    padded[1, :6] = rows
    mask = torch.zeros(3, 20, dtype=torch.bool)
    mask[0, :2] = mask[1, :6] = mask[2, :20] = True
    together = head.contextualize(padded, mask)
    torch.testing.assert_close(together[1, :6], alone[0], atol=1e-5, rtol=1e-5)


def test_attention_is_bidirectional(head: AlignmentHead) -> None:
    """The first token sees the last one: the blocks have no causal mask."""
    rows = torch.randn(1, 6, WIDTH, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(1, 6, dtype=torch.bool)
    changed = rows.clone()
    changed[0, -1] = rows[0, -1].flip(0)
    assert not torch.allclose(head.contextualize(rows, mask)[0, 0], head.contextualize(changed, mask)[0, 0], atol=1e-4)


def test_dropout_only_in_training() -> None:
    """In training two passes differ; in evaluation they are equal."""
    module = AlignmentHead(config())
    rows, mask = torch.randn(2, 8, WIDTH), torch.ones(2, 8, dtype=torch.bool)
    module.train()
    assert not torch.equal(module.contextualize(rows, mask), module.contextualize(rows, mask))
    module.eval()
    assert torch.equal(module.contextualize(rows, mask), module.contextualize(rows, mask))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_head_computes_in_fp32(head: AlignmentHead, dtype: torch.dtype) -> None:
    """States of a half-precision backbone are projected in fp32."""
    states = torch.randn(4, D, generator=torch.Generator().manual_seed(1)).to(dtype)
    projected = head.project(states)
    assert projected.dtype == torch.float32
    torch.testing.assert_close(projected, head.project(states.float()), atol=0, rtol=0)


def test_half_precision_rows_are_read_as_fp32(head: AlignmentHead) -> None:
    """Rows that crossed a process as fp16 pass through fp32 blocks."""
    batch = ragged(head, random_states(4), [[True] * 4])
    out = head.contextualize_ragged(batch.with_values(batch.values.astype(np.float16)))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, head.contextualize_ragged(batch), atol=2e-2, rtol=2e-2)


def test_every_parameter_learns() -> None:
    """No parameter is cut off from the score, so a training step reaches each of them."""
    module = AlignmentHead(config())
    rows = module.contextualize(module.project(torch.randn(2, 5, D)), torch.ones(2, 5, dtype=torch.bool))
    sims = torch.einsum("bqd,bkd->bqk", module.queries(rows), module.keys(rows))
    torch.autograd.backward(module.scale * sims.amax(-1).mean())
    assert [name for name, p in module.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


def test_no_blocks_is_a_head_too() -> None:
    """`blocks: 0` compares projected tokens directly."""
    module = AlignmentHead(config(blocks=0))
    rows = torch.randn(1, 3, WIDTH)
    assert torch.equal(module.contextualize(rows, torch.ones(1, 3, dtype=torch.bool)), rows)
