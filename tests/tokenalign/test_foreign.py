"""Heads of other programs: the same numbers under other names and layouts, or a refusal that lists all it lacks."""

import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from tokenalign.config import ModelConfig
from tokenalign.errors import CheckpointError, ConfigError
from tokenalign.foreign import ForeignOverrides
from tokenalign.foreign_tensors import BLOCK_SLOTS, HEAD_SLOTS, read_tensors
from tokenalign.head import AlignmentHead
from tokenalign.weights import load_head

D, WIDTH, HEADS, FFN, BLOCKS = 24, 16, 4, 40, 2
REVISION = "70d244cc86ccca08cf5af4e1e306ecf908b1ad5e"
CONFIG: dict[str, Any] = {
    "backbone": {"model_id": "Qwen/Qwen3-1.7B", "revision": REVISION},
    "heads": HEADS,
    "max_length": 128,
    "document_template": "{text}",
    "label_template": "{label}",
    "temperature": 0.944,
}
State = dict[str, Tensor]

# How a program may lay a head out: what our tensors are called, `+` where several are one, laid behind each other.
OWN = {name: name for name in HEAD_SLOTS} | {f"blocks.{{i}}.{name}": f"blocks.{{i}}.{name}" for name in BLOCK_SLOTS}


def layout(
    head: Mapping[str, str], block: str, attention: Mapping[str, str], layers: Mapping[str, str]
) -> dict[str, str]:
    """Our names (`+` between those that are one tensor) -> foreign names, `{i}` for the block."""
    names = dict(head)
    for ours, foreign in attention.items():
        joined = "+".join(f"blocks.{{i}}.{role}.weight" for role in ours.split("+"))
        names[joined] = f"{block}.{foreign}"
    for ours, foreign in layers.items():
        for kind in ("weight", "bias"):
            names[f"blocks.{{i}}.{ours}.{kind}"] = f"{block}.{foreign}.{kind}"
    return names


LAYOUTS: dict[str, dict[str, str]] = {
    "ours": OWN,
    "torch encoder layers": layout(
        {
            "input.weight": "input_affine.weight",
            "input.bias": "input_affine.bias",
            "input.linear.weight": "projection.weight",
            "query.weight": "q_proj.weight",
            "key.weight": "k_proj.weight",
            "log_scale": "log_logit_scale",
        },
        "encoder.layers.{i}",
        {"query+key+value": "self_attn.in_proj_weight", "output": "self_attn.out_proj.weight"},
        {"attention_norm": "norm1", "ffn_norm": "norm2", "ffn_in": "linear1", "ffn_out": "linear2"},
    ),
    "decoder habits": layout(
        {
            "input.weight": "gamma",
            "input.bias": "beta",
            "input.linear.weight": "input_proj.weight",
            "query.weight": "label_proj.weight",
            "key.weight": "doc_proj.weight",
            "log_scale": "scale.log",
        },
        "h.{i}",
        {"query+key+value": "attn.c_attn.weight", "output": "attn.c_proj.weight"},
        {"attention_norm": "ln_1", "ffn_norm": "ln_2", "ffn_in": "mlp.c_fc", "ffn_out": "mlp.c_proj"},
    ),
    "separate projections": layout(
        {
            "input.weight": "norm_weight",
            "input.bias": "norm_bias",
            "input.linear.weight": "proj.weight",
            "query.weight": "query_projection.weight",
            "key.weight": "key_projection.weight",
            "log_scale": "log_scale",
        },
        "layers.{i}",
        {
            "query": "self_attn.q_proj.weight",
            "key": "self_attn.k_proj.weight",
            "value": "self_attn.v_proj.weight",
            "output": "self_attn.o_proj.weight",
        },
        {
            "attention_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "ffn_in": "mlp.up_proj",
            "ffn_out": "mlp.down_proj",
        },
    ),
    "sequentials": layout(
        {
            "input.weight": "input.0.weight",
            "input.bias": "input.0.bias",
            "input.linear.weight": "input.1.weight",
            "query.weight": "label_query.weight",
            "key.weight": "document_key.weight",
            "log_scale": "log_scale",
        },
        "context_blocks.{i}",
        {"query+key+value": "attn.qkv.weight", "output": "attn.proj.weight"},
        {"attention_norm": "attn_norm", "ffn_norm": "ffn.0", "ffn_in": "ffn.1", "ffn_out": "ffn.4"},
    ),
    "key and value fused": layout(
        {
            "input.weight": "input_scale",
            "input.bias": "input_shift",
            "input.linear.weight": "reduce.weight",
            "query.weight+key.weight": "qk_proj.weight",
            "log_scale": "log_logit_scale",
        },
        "block_{i}",
        {"query": "attn.to_q.weight", "key+value": "attn.to_kv.weight", "output": "attn.to_out.0.weight"},
        {"attention_norm": "norms.0", "ffn_norm": "norms.1", "ffn_in": "ff.fc1", "ffn_out": "ff.fc2"},
    ),
    "camel case and short names": layout(
        {
            "input.weight": "inputNorm.weight",
            "input.bias": "inputNorm.bias",
            "input.linear.weight": "inputProjection.weight",
            "query.weight": "Wq.weight",
            "key.weight": "Wk.weight",
            "log_scale": "logScale",
        },
        "transformer.{i}",
        {"query": "Wq.weight", "key": "Wk.weight", "value": "Wv.weight", "output": "Wo.weight"},
        {"attention_norm": "LayerNorm1", "ffn_norm": "LayerNorm2", "ffn_in": "w1", "ffn_out": "w2"},
    ),
}


def make_head(**changes: int) -> AlignmentHead:
    """A head of which no two tensors are alike, so that a swap shows."""
    sizes = {"backbone_width": D, "width": WIDTH, "heads": HEADS, "ffn_width": FFN, "blocks": BLOCKS} | changes
    torch.manual_seed(0)
    head = AlignmentHead(ModelConfig.parse({"backbone": {"reference": "none"}} | sizes))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return head.eval()


def relaid(head: AlignmentHead, names: Mapping[str, str], prefix: str = "", first_block: int = 0) -> State:
    """The head's tensors as another program would have laid them out."""
    state = head.state_dict()
    foreign = {}
    for ours, theirs in names.items():
        for i in range(len(head.blocks)) if "{i}" in ours else [0]:
            parts = [state[name.format(i=i)] for name in ours.split("+")]
            foreign[prefix + theirs.format(i=first_block + i)] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return foreign


def write(folder: Path, config: Any, state: State) -> Path:
    """A model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


def outputs(head: AlignmentHead) -> list[Tensor]:
    """Every number that a head gives on two texts, one of them padded."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(2, 7, head.backbone_width, generator=generator)
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    with torch.no_grad():
        rows = head.contextualize(head.project(states), mask)
        return [head.project(states), rows[mask], head.queries(rows)[mask], head.keys(rows)[mask], head.scale]


def assert_same(head: AlignmentHead, other: AlignmentHead) -> None:
    for mine, theirs in zip(outputs(head), outputs(other), strict=True):
        assert torch.equal(mine, theirs)


def refusal(folder: Path, overrides: ForeignOverrides | None = None) -> str:
    """What the refused head's error says."""
    with pytest.raises(CheckpointError) as caught:
        load_head(folder, overrides=overrides)
    return str(caught.value)


# Layouts of tensors


@pytest.mark.parametrize("prefix", ["", "model.", "module.head."])
@pytest.mark.parametrize("names", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_gives_the_original_numbers(tmp_path: Path, names: dict[str, str], prefix: str) -> None:
    """Other names, fused or separate matrices and outer modules change no bit of any output."""
    head = make_head()
    config, loaded, _ = load_head(write(tmp_path, CONFIG, relaid(head, names, prefix)))
    assert_same(head, loaded)
    assert (config.backbone_width, config.width, config.blocks, config.ffn_width) == (D, WIDTH, BLOCKS, FFN)


def test_a_head_of_the_cards_size_keeps_every_parameter(tmp_path: Path) -> None:
    """At D = 2,048 the adopted head has the card's 2,236,929 parameters."""
    head = make_head(backbone_width=2048, width=256, ffn_width=1024)
    loaded = load_head(write(tmp_path, CONFIG, relaid(head, LAYOUTS["torch encoder layers"], "head.")))[1]
    assert sum(parameter.numel() for parameter in loaded.parameters()) == 2_236_929
    assert_same(head, loaded)


@pytest.mark.parametrize("names", LAYOUTS.values(), ids=LAYOUTS)
def test_names_decide_where_shapes_can_not(tmp_path: Path, names: dict[str, str]) -> None:
    """With all widths equal nothing shows in a shape, and each tensor finds its place, or the head is refused."""
    head = make_head(backbone_width=WIDTH, ffn_width=WIDTH)
    folder = write(tmp_path, CONFIG, relaid(head, names))
    if names["input.weight"] in {"gamma", "norm_weight"}:  # may be of a norm behind the blocks
        assert "tensor input.weight: none found; one of shape (16,) is needed" in refusal(folder)
    else:
        assert_same(head, load_head(folder)[1])


@pytest.mark.parametrize("first_block", [0, 1])
def test_blocks_are_ordered_by_number(tmp_path: Path, first_block: int) -> None:
    """Block 10 comes after block 9, not after block 1, and a count may start at one."""
    head = make_head(blocks=12)
    state = relaid(head, LAYOUTS["torch encoder layers"], first_block=first_block)
    assert_same(head, load_head(write(tmp_path, CONFIG, state))[1])


def test_a_gap_in_the_blocks_is_told(tmp_path: Path) -> None:
    """Blocks 0 and 2 without 1 are not taken for two blocks."""
    state = relaid(make_head(blocks=3), LAYOUTS["torch encoder layers"])
    state = {name: tensor for name, tensor in state.items() if "layers.1." not in name}
    assert "blocks encoder.layers: numbered 0, 2; one of the blocks is not there" in refusal(
        write(tmp_path, CONFIG, state)
    )


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_head_may_have_few_blocks_or_none(tmp_path: Path, blocks: int) -> None:
    """Without blocks nothing attends, and the number of heads need not be known."""
    head = make_head(blocks=blocks)
    config = {key: value for key, value in CONFIG.items() if key != "heads" or blocks}
    assert_same(head, load_head(write(tmp_path, config, relaid(head, OWN)))[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_dtypes_load_as_fp32(tmp_path: Path, dtype: torch.dtype) -> None:
    """Half precision weights are widened, and compute as fp32."""
    head = make_head()
    head.load_state_dict({name: tensor.to(dtype).float() for name, tensor in head.state_dict().items()})
    state = {name: tensor.to(dtype) for name, tensor in relaid(head, LAYOUTS["sequentials"]).items()}
    loaded = load_head(write(tmp_path, CONFIG, state))[1]
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert_same(head, loaded)


def test_dimensions_of_size_one_don_t_matter(tmp_path: Path) -> None:
    """A scale of shape [1] and an affine of shape [1, 1, D] are the same numbers."""
    head = make_head()
    state = relaid(head, OWN)
    state["log_scale"] = state["log_scale"].reshape(1)
    state["input.weight"] = state["input.weight"].reshape(1, 1, D)
    assert_same(head, load_head(write(tmp_path, CONFIG, state))[1])


def test_the_table_of_slots_is_the_heads() -> None:
    """What is looked for is just what the head holds, with its shapes."""
    sizes = {"backbone_width": D, "width": WIDTH, "ffn_width": FFN}
    slots = HEAD_SLOTS | {f"blocks.0.{name}": dims for name, dims in BLOCK_SLOTS.items()}
    assert {name: tuple(sizes[dim] for dim in dims) for name, dims in slots.items()} == {
        name: tuple(tensor.shape) for name, tensor in make_head(blocks=1).state_dict().items()
    }


@pytest.mark.parametrize("names", LAYOUTS.values(), ids=LAYOUTS)
def test_each_tensor_is_needed(names: dict[str, str]) -> None:
    """Without any one tensor, ours that come of it are told as missing, by our name and with their shape."""
    shapes = {name: tuple(tensor.shape) for name, tensor in relaid(make_head(), names).items()}
    for ours, theirs in names.items():
        for i in range(BLOCKS) if "{i}" in ours else [0]:
            left = {name: shape for name, shape in shapes.items() if name != theirs.format(i=i)}
            told = "\n".join(read_tensors(left, {}, ()).problems)
            for slot in ours.format(i=i).split("+"):
                assert re.search(rf"tensor {re.escape(slot)}: (none found; one of|.* has shape)", told), told


@pytest.mark.parametrize("names", LAYOUTS.values(), ids=LAYOUTS)
def test_a_second_of_any_tensor_is_told(names: dict[str, str]) -> None:
    """A tensor twice, once below an outer module, is never resolved by taking the first."""
    shapes = {name: tuple(tensor.shape) for name, tensor in relaid(make_head(), names).items()}
    for name, shape in shapes.items():
        problems = read_tensors(shapes | {f"head.{name}": shape}, {}, ()).problems
        assert any(name in problem for problem in problems)


WORDS = ["model", "blocks", "layers", "0", "1", "attn", "q", "k", "qkv", "norm", "ln_1", "ffn", "fc1", "input", "proj"]


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.lists(
            st.sampled_from([*WORDS, "weight", "bias", "log_scale", "", "é", "[0:1]"]), min_size=1, max_size=5
        ).map(".".join),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
        max_size=12,
    )
)
def test_any_checkpoint_is_read_or_its_problems_are_told(shapes: dict[str, tuple[int, ...]]) -> None:
    """Whatever tensors there are, each is used, ignored or told of, and an unread head always has a problem."""
    reading = read_tensors(shapes, {}, ())
    used = {source.name for source in reading.sources.values()}
    told = "\n".join(reading.problems)
    assert all(name in used or name in told for name in shapes)
    needed = {*HEAD_SLOTS, *(f"blocks.{i}.{name}" for i in range(reading.blocks) for name in BLOCK_SLOTS)}
    assert reading.problems or reading.sources.keys() == needed


# What is refused, and rescued by an override


def without(name: str) -> Callable[[State], State]:
    return lambda state: {key: tensor for key, tensor in state.items() if key != name}


def renamed(**names: str) -> Callable[[State], State]:
    return lambda state: {names.get(key, key): tensor for key, tensor in state.items()}


def plus(**extra: Tensor) -> Callable[[State], State]:
    return lambda state: state | {name.replace("__", "."): tensor for name, tensor in extra.items()}


def changed(name: str, new_name: str, change: Callable[[Tensor], Tensor]) -> Callable[[State], State]:
    return lambda state: without(name)(state) | {new_name: change(state[name])}


REFUSED: list[tuple[str, Callable[[State], State], list[str], ForeignOverrides]] = [
    (
        "a scale that may be a logarithm",
        renamed(log_scale="logit_scale"),
        [r"log_scale: 'logit_scale' may be the scale", r'"log_scale": "logit_scale"', r"log\(logit_scale\)"],
        ForeignOverrides(tensors={"log_scale": "logit_scale"}),
    ),
    (
        "an unknown name",
        changed("query.weight", "left.weight", lambda tensor: tensor),
        [r"tensor query\.weight: none found; one of shape \(16, 16\)", r"left over.*: left\.weight \(16, 16\)"],
        ForeignOverrides(tensors={"query.weight": "left.weight"}),
    ),
    (
        "two that could be one of ours",
        plus(label_proj__weight=torch.ones(WIDTH, WIDTH)),
        [r"tensor query\.weight: label_proj\.weight and query\.weight could all be it"],
        ForeignOverrides(tensors={"query.weight": "query.weight"}, ignore=("label_proj.*",)),
    ),
    (
        "two of which one is left out",
        plus(label_proj__weight=torch.ones(WIDTH, WIDTH)),
        [r"could all be it"],
        ForeignOverrides(ignore=("label_proj.weight",)),
    ),
    (
        "a name that speaks of both sides",
        changed("key.weight", "doc_query.weight", lambda tensor: tensor),
        [r"'doc_query\.weight' speaks of labels and of documents", r"tensor key\.weight: none found"],
        ForeignOverrides(tensors={"key.weight": "doc_query.weight"}),
    ),
    (
        "biases in attention and a scorer",
        plus(blocks__0__query__bias=torch.zeros(WIDTH), scorer__0__weight=torch.zeros(3, WIDTH)),
        [r"left over, .*: blocks\.0\.query\.bias \(16,\), scorer\.0\.weight \(3, 16\)"],
        ForeignOverrides(ignore=("blocks.*.query.bias", "scorer.*")),
    ),
    (
        "a norm behind the blocks",
        plus(final_norm__weight=torch.ones(WIDTH), final_norm__bias=torch.zeros(WIDTH)),
        [r"left over, .*: final_norm\.bias \(16,\), final_norm\.weight \(16,\)"],
        ForeignOverrides(ignore=("final_norm.*",)),
    ),
    (
        "blocks of one side",
        plus(doc_layers__0__attn__q__weight=torch.ones(WIDTH, WIDTH), doc_input__bias=torch.ones(D)),
        [r"left over, .*: doc_input\.bias \(24,\), doc_layers\.0\.attn\.q\.weight \(16, 16\)"],
        ForeignOverrides(ignore=("doc_*",)),
    ),
    (
        "blocks in two places",
        plus(more_layers__0__attn__q__weight=torch.ones(WIDTH, WIDTH), more_layers__0__scale=torch.ones(WIDTH)),
        [
            r"blocks\.0\.query\.weight: blocks\.0\.query\.weight and more_layers\.0\.attn\.q\.weight could all be it",
            r"left over, .*: more_layers\.0\.scale \(16,\)",
        ],
        ForeignOverrides(ignore=("more_layers.*",)),
    ),
    (
        "a bare square matrix",
        changed("key.weight", "Wk", lambda tensor: tensor.T),
        [r"tensor key\.weight: 'Wk' may be \[out, in\] or \[in, out\]", r'"transpose\(Wk\)" if not'],
        ForeignOverrides(tensors={"key.weight": "transpose(Wk)"}),
    ),
    (
        "a square kernel",
        changed("blocks.0.output.weight", "blocks.0.attn.out.kernel", lambda tensor: tensor),
        [r"tensor blocks\.0\.output\.weight: 'blocks\.0\.attn\.out\.kernel' may be"],
        ForeignOverrides(tensors={"blocks.0.output.weight": "blocks.0.attn.out.kernel"}),
    ),
    (
        "a logarithm to another base",
        renamed(log_scale="log2_scale"),
        [r"log_scale: 'log2_scale' may be the scale"],
        ForeignOverrides(tensors={"log_scale": "log2_scale"}),
    ),
    (
        "a matrix of another shape",
        changed("input.linear.weight", "input.linear.weight", lambda tensor: tensor.T),
        [r"tensor query\.weight: query\.weight has shape \(16, 16\), \(24, 24\) is needed"],
        ForeignOverrides(tensors={"input.linear.weight": "transpose(input.linear.weight)"}),
    ),
    (
        "a gated FFN",
        plus(blocks__0__ffn__gate__weight=torch.ones(FFN, WIDTH)),
        [r"blocks\.0\.ffn_in\.weight: blocks\.0\.ffn\.gate\.weight and blocks\.0\.ffn_in\.weight could all be it"],
        ForeignOverrides(ignore=("*.gate.weight",)),
    ),
    (
        "rows of which some are of no use",
        changed("key.weight", "towers", lambda tensor: torch.cat([torch.zeros_like(tensor), tensor])),
        [r"tensor key\.weight: none found", r"left over, .*: towers \(32, 16\)"],
        ForeignOverrides(tensors={"key.weight": "towers[16:32]"}, ignore=("towers",)),
    ),
]


@pytest.mark.parametrize(("change", "words", "overrides"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_what_is_not_sure_is_refused_until_the_user_says(
    tmp_path: Path, change: Callable[[State], State], words: list[str], overrides: ForeignOverrides
) -> None:
    """The refusal says what is missing, ambiguous or left over; an override then gives the original numbers."""
    head = make_head()
    folder = write(tmp_path, CONFIG, change(relaid(head, OWN)))
    said = refusal(folder)
    for pattern in words:
        assert re.search(pattern, said), said
    assert_same(head, load_head(folder, overrides=overrides)[1])


def test_rows_that_an_override_leaves_are_left_over(tmp_path: Path) -> None:
    """Who takes some rows of a tensor is told of the others, which may matter."""
    state = changed("key.weight", "towers", lambda tensor: torch.cat([tensor, tensor]))(relaid(make_head(), OWN))
    folder = write(tmp_path, CONFIG, state)
    said = refusal(folder, ForeignOverrides(tensors={"key.weight": "towers[16:]"}))
    assert "left over, whose maths this head doesn't have: 16 rows of towers (32, 16)" in said


def test_heads_interleaved_in_one_matrix_are_not_taken_for_fused(tmp_path: Path) -> None:
    """`query_key_value` holds query, key and value head by head in the models that use this name."""
    own = relaid(make_head(blocks=1), OWN)
    parts = [own.pop(f"blocks.0.{part}.weight") for part in ("query", "key", "value")]
    state = own | {"blocks.0.attention.query_key_value.weight": torch.cat(parts)}
    said = refusal(write(tmp_path, CONFIG, state))
    assert "tensor blocks.0.value.weight: none found" in said
    assert "left over, whose maths this head doesn't have: blocks.0.attention.query_key_value.weight (48, 16)" in said


@pytest.mark.parametrize("name", ["blocks.999999999999.q.weight", f"blocks.{'9' * 5000}.q.weight", "blocks.²._"])
def test_absurd_block_numbers_are_refused_at_once(tmp_path: Path, name: str) -> None:
    """A number in a name reserves no memory and overflows nothing."""
    state = relaid(make_head(), OWN) | {name: torch.ones(WIDTH, WIDTH)}
    assert name in refusal(write(tmp_path, CONFIG, state))


def test_fused_rows_are_taken_as_the_override_says(tmp_path: Path) -> None:
    """Value, key, query in one tensor of an unknown name come apart by rows."""
    head = make_head(blocks=1)
    own = relaid(head, OWN)
    parts = ["value", "key", "query"]
    state = {name: tensor for name, tensor in own.items() if name not in {f"blocks.0.{p}.weight" for p in parts}}
    state["mix"] = torch.cat([own[f"blocks.0.{part}.weight"] for part in parts])
    tensors = {f"blocks.0.{part}.weight": f"mix[{16 * i}:{16 * i + 16}]" for i, part in enumerate(parts)}
    assert_same(head, load_head(write(tmp_path, CONFIG, state), overrides=ForeignOverrides(tensors=tensors))[1])


def test_a_linear_scale_becomes_a_logarithm(tmp_path: Path) -> None:
    """`log(scale)` gives the scale back within fp32's rounding, and a scale that has no logarithm is refused."""
    head = make_head()
    state = without("log_scale")(relaid(head, OWN)) | {"scale": head.scale.detach()}
    overrides = ForeignOverrides(tensors={"log_scale": "log(scale)"})
    loaded = load_head(write(tmp_path / "good", CONFIG, state), overrides=overrides)[1]
    torch.testing.assert_close(loaded.scale, head.scale, rtol=1e-6, atol=0)
    bad = write(tmp_path / "bad", CONFIG, state | {"scale": torch.tensor(-1.0)})
    assert "log_scale holds NaN or infinity" in refusal(bad, overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (ForeignOverrides(tensors={"qeury.weight": "query.weight"}), "'qeury.weight': not a name of ours; these are"),
        (ForeignOverrides(tensors={"query.weight": "nowhere"}), "'nowhere' names no tensor of this checkpoint"),
        (ForeignOverrides(tensors={"query.weight": "query.weight[0:99]"}), "asks for rows 0 to 99 of 16"),
        (ForeignOverrides(tensors={"query.weight": "query.weight[8:8]"}), "asks for rows 8 to 8 of 16"),
        (ForeignOverrides(tensors={"log_scale": "transpose(log_scale)"}), "a matrix is needed"),
        (ForeignOverrides(tensors={"query.weight": "query.weight[0:8]"}), "has shape (8, 16), (16, 16) is needed"),
        (ForeignOverrides(config={"haeds": 4}), "'haeds': not a key of ours; these are"),
        (ForeignOverrides(config={"width": 32}), "config width: override = 32, but the tensors' shapes say 16"),
        (ForeignOverrides(ignore=("scorer.*",)), "'scorer.*' matches no tensor and no config key"),
    ],
)
def test_an_override_that_fits_nothing_is_told(tmp_path: Path, overrides: ForeignOverrides, words: str) -> None:
    """A misspelt or impossible override is an error, never a silent no-op."""
    assert words in refusal(write(tmp_path, CONFIG, relaid(make_head(), OWN)), overrides)


def test_a_lone_string_is_no_list_of_names() -> None:
    """`ignore="scorer"` would be read letter by letter, so it is refused at once."""
    with pytest.raises(ConfigError, match="ignore must be a tuple"):
        ForeignOverrides(ignore="scorer")  # type: ignore[arg-type]  # that is the mistake


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    """Quantised weights without their scales would load as nonsense."""
    state = relaid(make_head(), OWN)
    state["query.weight"] = state["query.weight"].to(torch.int8)
    assert "tensor query.weight: query.weight is of torch.int8" in refusal(write(tmp_path, CONFIG, state))


# Configurations

CONFIGS: dict[str, dict[str, Any]] = {
    "nested": {
        "head": {"width": WIDTH, "num_layers": BLOCKS, "heads": HEADS, "ffn_dim": FFN, "activation": "GELU"},
        "backbone": {"model_id": "Qwen/Qwen3-1.7B", "revision": REVISION, "hidden_size": D},
        "templates": {"document": "Message: {message}", "label": "It concerns {category with spaces}."},
        "calibration": {"temperature": 0.944},
        "inference": {"max_length": 96},
    },
    "flat": {
        "backbone_name_or_path": "Qwen/Qwen3-1.7B",
        "backbone_revision": REVISION,
        "input_dim": D,
        "proj_dim": WIDTH,
        "n_blocks": BLOCKS,
        "n_heads": HEADS,
        "dim_feedforward": FFN,
        "max_seq_len": 96,
        "input_prefix": "Message: ",
        "label_template": "It concerns {}.",
        "temperature": 0.944,
        "norm_eps": 1e-5,
        "max_scale": 100.0,
    },
    "camel case, deep": {
        "model": {
            "baseModel": "Qwen/Qwen3-1.7B@" + REVISION,
            "alignmentHead": {"hiddenSize": WIDTH, "numHeads": HEADS},
            "maxLength": 96,
            "text": {"documentTemplate": "Message: {0}", "label_prefix": "It concerns ", "label_suffix": "."},
        },
        "calibrationTemperature": 0.944,
    },
    "ours, but for the version": {
        "backbone": {"reference": "Qwen/Qwen3-1.7B", "revision": REVISION},
        "backbone_width": D,
        "width": WIDTH,
        "blocks": BLOCKS,
        "heads": HEADS,
        "ffn_width": FFN,
        "max_length": 96,
        "document_template": "Message: {text}",
        "label_template": "It concerns {label}.",
        "temperature": 0.944,
    },
    "synonyms that agree": {
        "encoder": {"id": "Qwen/Qwen3-1.7B", "commit": REVISION},
        "backbone_id": "Qwen/Qwen3-1.7B",
        "heads": HEADS,
        "num_heads": HEADS,
        "max_document_length": 96,
        "max_label_length": 96,
        "document_template": "Message: {text}",
        "document_prefix": "",
        "label_template": "It concerns %s.",
        "candidate_template": "It concerns {candidate}.",
        "temperature": 0.944,
    },
}


@pytest.mark.parametrize("foreign", CONFIGS.values(), ids=CONFIGS)
def test_known_synonyms_give_our_keys(tmp_path: Path, foreign: dict[str, Any]) -> None:
    """Flat or nested, in whose words ever, it is the same configuration."""
    config, loaded, _ = load_head(write(tmp_path, foreign, relaid(make_head(), LAYOUTS["sequentials"])))
    assert config.model_dump(exclude={"provenance", "name"}) == {
        "schema_version": 1,
        "backbone": {"reference": "Qwen/Qwen3-1.7B", "revision": REVISION, "sha256": None},
        "backbone_width": D,
        "width": WIDTH,
        "blocks": BLOCKS,
        "heads": HEADS,
        "ffn_width": FFN,
        "max_length": 96,
        "document_template": "Message: {text}",
        "label_template": "It concerns {label}.",
        "temperature": 0.944,
        "multi_label": None,
        "abstention": None,
    }
    assert_same(make_head(), loaded)


def test_everything_missing_is_listed_at_once(tmp_path: Path) -> None:
    """One error names each key that shapes can't show, each tensor, and how to supply them."""
    state = without("input.bias")(renamed(log_scale="scale")(relaid(make_head(), OWN)))
    said = refusal(write(tmp_path, {"hidden_size": 16, "training": {"temperature": 2.0, "max_length": 64}}, state))
    for key in (
        "backbone.reference",
        "backbone.revision",
        "heads",
        "max_length",
        "document_template",
        "label_template",
    ):
        assert f"- config {key}: not stated" in said
    assert "- config temperature: not stated" in said
    assert "- tensor log_scale: " in said
    assert "- tensor input.bias: none found; one of shape (24,) is needed" in said
    assert 'ForeignOverrides(config={"backbone.reference": …, "backbone.revision": …, "heads": …' in said
    assert "not understood: hidden_size = 16, training.temperature = 2.0, training.max_length = 64" in said
    assert "width" not in re.sub(r"hidden_size|tensor .*", "", said)


@pytest.mark.parametrize("key", ["heads", "max_length", "document_template", "label_template", "temperature"])
def test_one_missing_key_is_refused_and_its_override_rescues(tmp_path: Path, key: str) -> None:
    """Just that key is asked for, none is taken from a default, and the override's value is the one in force."""
    folder = write(tmp_path, {k: v for k, v in CONFIG.items() if k != key}, relaid(make_head(), OWN))
    said = refusal(folder)
    assert f'config={{"{key}": …}}' in said
    assert said.count("not stated") == 1
    loaded, head, _ = load_head(folder, overrides=ForeignOverrides(config={key: CONFIG[key]}))
    assert getattr(loaded, key) == CONFIG[key]
    assert_same(make_head(), head)


@pytest.mark.parametrize(
    ("backbone", "overrides", "missing"),
    [
        ({"model_id": "Qwen/Qwen3-1.7B"}, {"backbone": {"revision": REVISION}}, "backbone.revision"),
        ({"revision": REVISION}, {"backbone.reference": f"Qwen/Qwen3-1.7B@{REVISION}"}, "backbone.reference"),
        ({}, {"backbone.reference": "package:some_model"}, "backbone.reference"),
        ({"dtype": "float16"}, {"backbone.reference": "./encoder"}, "backbone.reference"),
    ],
)
def test_a_missing_backbone_is_refused_and_its_override_rescues(
    tmp_path: Path, backbone: dict[str, Any], overrides: dict[str, Any], missing: str
) -> None:
    """A hub id needs its commit, a package or a folder doesn't."""
    folder = write(tmp_path, CONFIG | {"backbone": backbone}, relaid(make_head(), OWN))
    assert f"config {missing}: not stated" in refusal(folder)
    config, _, _ = load_head(folder, overrides=ForeignOverrides(config=overrides))
    assert (config.backbone.revision == REVISION) == config.backbone.reference.startswith("Qwen")


def test_a_commit_belongs_to_its_own_backbone(tmp_path: Path) -> None:
    """Who names another encoder names its commit too: the stated one is of the other."""
    folder = write(tmp_path, CONFIG, relaid(make_head(), OWN))
    overrides = ForeignOverrides(config={"backbone.reference": "someone/else"})
    assert "config backbone.revision: not stated" in refusal(folder, overrides)


def test_a_backbone_folder_beside_the_head_needs_no_commit(tmp_path: Path) -> None:
    """`encoders/small` looks like a hub id, but is a folder here."""
    (tmp_path / "encoders" / "small").mkdir(parents=True)
    folder = write(tmp_path, CONFIG | {"backbone": "encoders/small"}, relaid(make_head(), OWN))
    assert load_head(folder)[0].backbone.reference == "encoders/small"


@pytest.mark.parametrize(
    ("change", "words", "rescue"),
    [
        ({"num_heads": 8}, "config heads: heads = 4 but num_heads = 8", {"heads": 4}),
        ({"max_document_length": 64}, "config max_length: max_length = 128 but", {"max_length": 128}),
        ({"width": 32}, "config width: width = 32, but the tensors' shapes say 16", {"width": 16}),
        ({"num_layers": 28}, "config blocks: num_layers = 28, but the tensors' shapes say 2", {"blocks": 2}),
        ({"ffn_dim": 64}, "config ffn_width: ffn_dim = 64, but", {"ffn_width": FFN}),
        ({"backbone_dim": 2048}, "config backbone_width: backbone_dim = 2048, but", {"backbone_width": D}),
        ({"label_prefix": "Topic: "}, "but label_prefix = 'Topic: {label}'", {"label_template": "Topic: {label}"}),
        ({"label_template": "no place"}, "needs exactly one placeholder", {"label_template": "{label}"}),
        ({"label_template": "{label}, {label}"}, "needs exactly one placeholder", {"label_template": "{label}"}),
        ({"label_template": "{{ label }}"}, "needs exactly one placeholder", {"label_template": "{label}"}),
        ({"label_template": "{topic: str}"}, "the placeholder {topic: str}, not known", {"label_template": "{label}"}),
        ({"document_template": ["{text}"]}, "is no string", {"document_template": "{text}"}),
        ({"document_template": None, "doc_prefix": 3}, "doc_prefix = 3 is no string", {"document_template": "{text}"}),
    ],
)
def test_contradictions_and_unreadable_values_are_refused(
    tmp_path: Path, change: dict[str, Any], words: str, rescue: dict[str, Any]
) -> None:
    """The error names both sides of a contradiction, and an override settles it."""
    folder = write(tmp_path, CONFIG | change, relaid(make_head(), OWN))
    assert words in refusal(folder)
    config, head, _ = load_head(folder, overrides=ForeignOverrides(config=rescue))
    assert all(getattr(config, key) == value for key, value in rescue.items())
    assert_same(make_head(), head)


@pytest.mark.parametrize(
    ("key", "value"), [("activation", "relu"), ("norm_eps", 1e-6), ("pre_norm", False), ("max_scale", 50)]
)
def test_other_maths_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    """What no shape shows and we compute otherwise is an error, unless the user accepts other scores."""
    folder = write(tmp_path, CONFIG | {"head": {key: value}}, relaid(make_head(), OWN))
    assert f"config head.{key} = {value!r}: this head computes with" in refusal(folder)
    config, _, _ = load_head(folder, overrides=ForeignOverrides(ignore=(f"head.{key}",)))
    assert config.provenance["foreign_config"]["ignored"] == [f"head.{key}"]


def test_values_out_of_bounds_are_named_by_our_key(tmp_path: Path) -> None:
    """A value that was understood and makes no sense is a ConfigError, as in an own configuration."""
    folder = write(tmp_path, CONFIG | {"heads": 3, "temperature": 0}, relaid(make_head(), OWN))
    with pytest.raises(ConfigError, match="temperature"):
        load_head(folder)


def test_nothing_is_dropped_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keys that were not understood are logged by name and kept, with what was taken from where."""
    notes = {"training": {"lr": 0.0003, "seeds": [42]}, "provenance": {"data": "banking77"}, "empty": {}}
    state = relaid(make_head(), LAYOUTS["torch encoder layers"]) | {"position_ids": torch.arange(4)}
    folder = write(tmp_path, CONFIG | notes, state)
    with caplog.at_level(logging.WARNING, logger="tokenalign"):
        config, _, _ = load_head(folder, overrides=ForeignOverrides(ignore=("position_ids",)))
    assert "training.lr, training.seeds, empty" in caplog.text
    assert "left out as asked for: position_ids" in caplog.text
    assert config.provenance["data"] == "banking77"
    record = config.provenance["foreign_config"]
    assert record["unused"] == {"training.lr": 0.0003, "training.seeds": [42], "empty": {}}
    assert record["keys"]["backbone.reference"] == "backbone.model_id"
    assert record["keys"]["width"] == "shapes"
    assert record["tensors"]["blocks.1.key.weight"] == "encoder.layers.1.self_attn.in_proj_weight[16:32]"
    assert record["ignored"] == ["position_ids"]


def test_an_adopted_head_is_saved_as_an_own_one(tmp_path: Path) -> None:
    """Saved and loaded again it needs no adapter, and keeps the record of its origin."""
    from tokenalign.weights import save_head

    config, head, _ = load_head(write(tmp_path / "foreign", CONFIG, relaid(make_head(), LAYOUTS["sequentials"])))
    save_head(tmp_path / "own", config, head)
    again, loaded, _ = load_head(tmp_path / "own")
    assert again == config
    assert_same(head, loaded)


def test_the_digest_covers_what_was_taken_for_what(tmp_path: Path) -> None:
    """Queries and keys swapped by an override are another head of the same file, and must not share cached rows."""
    folder = write(tmp_path, CONFIG, relaid(make_head(), OWN))
    swapped = ForeignOverrides(tensors={"query.weight": "key.weight", "key.weight": "query.weight"})
    assert load_head(folder)[2] == load_head(folder, overrides=ForeignOverrides())[2]
    assert load_head(folder)[2] != load_head(folder, overrides=swapped)[2]
