"""The frozen encoder: the same vectors alone and in a batch, and nothing loaded that does not fit."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BertConfig, BertModel

from tokenalign.backbone import Backbone, BackboneIdentity, identify, resolve_device, resolve_dtype
from tokenalign.config import BackboneReference, ModelConfig
from tokenalign.errors import BackboneError, CheckpointError, DeviceMemoryError, InputError
from tokenalign.tokens import TokenBatch

IDENTITY = BackboneIdentity("test", None, "", "", "float32")


def config_for(folder: Path, **changes: Any) -> ModelConfig:
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    return ModelConfig.parse({"backbone": {"reference": str(folder)}, "backbone_width": width} | changes)


def load(folder: Path, **options: Any) -> Backbone:
    return Backbone.load(config_for(folder), device="cpu", **options)


def batch_of(*sequences: list[int]) -> TokenBatch:
    lengths = np.array([len(s) for s in sequences], dtype=np.int32)
    ids = np.array([i for s in sequences for i in s], dtype=np.int32)
    return TokenBatch(ids, lengths, np.ones(len(ids), dtype=np.bool_))


SEQUENCES = [[5, 9, 7], [11], [20, 3, 8, 40, 41, 42, 43], [5, 9, 7], list(range(5, 45))]


@pytest.mark.parametrize("budget", [8_192, 40, 1])
def test_alone_and_in_a_batch_are_the_same(any_backbone: Path, budget: int) -> None:
    """Every sequence gets the states that the Hugging Face model gives it alone, in batches of any size."""
    backbone = load(any_backbone)
    model = AutoModel.from_pretrained(any_backbone).eval()
    states = backbone.encode(batch_of(*SEQUENCES), max_batch_tokens=budget)
    with torch.inference_mode():
        expected = [model(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in SEQUENCES]
    assert states.shape == (sum(map(len, SEQUENCES)), backbone.width)
    torch.testing.assert_close(states, torch.cat(expected), atol=1e-5, rtol=1e-4)


def test_states_come_without_gradients(any_backbone: Path) -> None:
    """The encoder is frozen and in evaluation mode: two passes are equal."""
    backbone = load(any_backbone)
    first, second = (backbone.encode(batch_of([5, 6, 7])) for _ in range(2))
    assert not first.requires_grad
    assert torch.equal(first, second)


def test_an_empty_batch(bert_backbone: Path) -> None:
    """No sequences, no states."""
    assert load(bert_backbone).encode(batch_of()).shape == (0, 32)


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_ids_out_of_the_vocabulary(bert_backbone: Path, bad: int) -> None:
    """A tokenizer of another model is found out before an index error deep in torch."""
    with pytest.raises(InputError, match="vocabulary"):
        load(bert_backbone).encode(batch_of([5, bad]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(any_backbone: Path, dtype: Any) -> None:
    """The encoder computes in the dtype asked for, passes its own check in it, and its identity says so."""
    backbone = load(any_backbone, dtype=dtype)
    assert backbone.identity.dtype == dtype
    states = backbone.encode(batch_of([5, 6, 7], [8]))
    assert str(states.dtype) == f"torch.{dtype}"
    assert bool(states.isfinite().all())


def test_auto_dtype() -> None:
    """bfloat16 on cuda, float16 on mps, float32 on a CPU."""
    kinds = {device: resolve_dtype("auto", torch.device(device)) for device in ("cuda", "mps", "cpu")}
    assert kinds == {"cuda": torch.bfloat16, "mps": torch.float16, "cpu": torch.float32}


def test_unknown_dtype() -> None:
    """The error lists what there is."""
    with pytest.raises(BackboneError, match="'int8' is unknown; use auto, float32, bfloat16, float16"):
        resolve_dtype("int8", torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")]
)
def test_auto_device(monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, expected: str) -> None:
    """cuda before mps before cpu."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert resolve_device("auto").type == expected


@pytest.mark.parametrize(
    ("device", "words"),
    [("abacus", "is unknown; use auto"), ("cuda:1", "is not available"), ("meta", "is not available")],
)
def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch, device: str, words: str) -> None:
    """The error names the device and the remedy."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackboneError, match=f"device '{device}' {words}"):
        resolve_device(device)


class MaskIgnoringBert(BertModel):  # type: ignore[no-untyped-call]  # transformers leaves its hook untyped
    """A model whose tokens see the padding."""

    def forward(self, input_ids: Any, attention_mask: Any = None, **options: Any) -> Any:
        return super().forward(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **options)


def tiny_bert(kind: type[BertModel]) -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    return kind(config, add_pooling_layer=False)


def test_self_check_finds_a_model_that_ignores_the_mask() -> None:
    """A backbone whose vectors depend on the neighbours is refused, with the deviation."""
    with pytest.raises(BackboneError, match="attention mask is not respected"):
        Backbone(tiny_bert(MaskIgnoringBert), IDENTITY, torch.device("cpu")).self_check()
    Backbone(tiny_bert(BertModel), IDENTITY, torch.device("cpu")).self_check()


def test_self_check_finds_nan() -> None:
    """NaN is never within a tolerance."""
    model = tiny_bert(BertModel)
    torch.nn.init.constant_(model.embeddings.word_embeddings.weight, float("nan"))
    with pytest.raises(BackboneError):
        Backbone(model, IDENTITY, torch.device("cpu")).self_check()


class Recording:
    """Wraps a model; remembers how many tokens each pass had, padding counted."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.passes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        self.passes.append(inputs["input_ids"].numel())
        return self._model(**inputs)


def recorded(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each pass from now on."""
    model = Recording(backbone._model)
    monkeypatch.setattr(backbone, "_model", model)
    return model.passes


@pytest.mark.parametrize("kind", ["bert", pytest.param("qwen3", marks=pytest.mark.data)])
def test_transformers_run_without_padding(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sequences of a batch share one pass over as many tokens as they have."""
    backbone = load(request.getfixturevalue(f"{kind}_backbone"))
    passes = recorded(backbone, monkeypatch)
    backbone.encode(batch_of(*SEQUENCES))
    assert passes == [sum(map(len, SEQUENCES))]


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried"),
]


class Small(Recording):
    """A model that has room for so many tokens and raises beyond."""

    def __init__(self, model: Any, room: int, error: RuntimeError) -> None:
        super().__init__(model)
        self._room, self._error = room, error

    def __call__(self, **inputs: Any) -> Any:
        if inputs["input_ids"].numel() > self._room:
            raise self._error
        return super().__call__(**inputs)


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_a_batch_too_large_for_the_device_is_halved(
    bert_backbone: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    """Every sequence gets its states, in passes that fit, and memory is given back before each of them."""
    backbone = load(bert_backbone)
    expected = backbone.encode(batch_of(*SEQUENCES))
    released: list[torch.device] = []
    monkeypatch.setattr("tokenalign.backbone.release_memory", released.append)
    model = Small(backbone._model, 40, error)
    monkeypatch.setattr(backbone, "_model", model)
    torch.testing.assert_close(backbone.encode(batch_of(*SEQUENCES)), expected, atol=1e-5, rtol=1e-4)
    assert model.passes == [4, 3, 7, 40]
    assert released == [torch.device("cpu")] * 3


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
def test_one_sequence_too_large_for_the_device(
    bert_backbone: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    """The error says how long the sequence is, and has torch's own as its cause."""
    backbone = load(bert_backbone)
    monkeypatch.setattr(backbone, "_model", Small(backbone._model, 20, error))
    with pytest.raises(DeviceMemoryError, match="one sequence of 40 tokens") as caught:
        backbone.encode(batch_of(*SEQUENCES))
    assert caught.value.__cause__ is error


def test_other_errors_of_a_pass_are_not_retried(bert_backbone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no lack of memory is raised as it is, at once."""
    backbone = load(bert_backbone)
    model = Small(backbone._model, 0, RuntimeError("shapes don't fit"))
    monkeypatch.setattr(backbone, "_model", model)
    with pytest.raises(RuntimeError, match="shapes don't fit"):
        backbone.encode(batch_of(*SEQUENCES))


@pytest.mark.data
def test_models_with_linear_attention_stay_padded(qwen35_backbone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a token sees the sequence before its own, packing is found out and not used."""
    backbone = load(qwen35_backbone)
    assert backbone.pack() is False
    passes = recorded(backbone, monkeypatch)
    backbone.encode(batch_of([1, 2, 3], [1, 2, 3, 4]))
    assert passes == [8]


class WindowedBert(BertModel):  # type: ignore[no-untyped-call]
    """A model that asks its attention for a window."""

    def forward(self, **inputs: Any) -> Any:
        return super().forward(sliding_window=64, **inputs)


class CountingBert(BertModel):  # type: ignore[no-untyped-call]
    """A model that takes the positions from the place in the row, whatever it is given."""

    def forward(self, position_ids: Any = None, **inputs: Any) -> Any:
        return super().forward(**inputs)


@pytest.mark.parametrize("kind", [WindowedBert, CountingBert])
def test_models_that_packing_would_change_stay_padded(kind: type[BertModel]) -> None:
    """A model that packing would give other states is used as it was."""
    backbone = Backbone(tiny_bert(kind), IDENTITY, torch.device("cpu"))
    before = backbone.encode(batch_of(*SEQUENCES))
    assert backbone.pack() is False
    assert torch.equal(backbone.encode(batch_of(*SEQUENCES)), before)
    assert Backbone(tiny_bert(BertModel), IDENTITY, torch.device("cpu")).pack() is True


def copy_of(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target, dirs_exist_ok=True)
    return target


@pytest.mark.parametrize("victim", ["encoder.layer.1.output.dense.weight", "embeddings.word_embeddings.weight"])
def test_missing_tensors_are_refused(bert_backbone: Path, tmp_path: Path, victim: str) -> None:
    """A tensor that would be random is named."""
    folder = copy_of(bert_backbone, tmp_path)
    state = load_file(folder / "model.safetensors")
    del state[victim]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BackboneError, match=f"lack 1 tensors.*{victim}"):
        load(folder)


def test_tensors_of_another_shape_are_refused(bert_backbone: Path, tmp_path: Path) -> None:
    """Weights that don't fit their config.json are an error, not random numbers."""
    folder = copy_of(bert_backbone, tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 48}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BackboneError):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(bert_backbone: Path, tmp_path: Path, name: str) -> None:
    """The model folder's missing file is in the error."""
    folder = copy_of(bert_backbone, tmp_path)
    config = config_for(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        Backbone.load(config, device="cpu")


def test_damaged_weights_are_refused(bert_backbone: Path, tmp_path: Path) -> None:
    """A cut file is a BackboneError, whatever the reader raises."""
    folder = copy_of(bert_backbone, tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(BackboneError, match="can't be loaded"):
        load(folder)


def test_pickled_weights_are_not_read(bert_backbone: Path, tmp_path: Path) -> None:
    """Only safetensors."""
    folder = copy_of(bert_backbone, tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only safetensors"):
        load(folder)


def test_remote_code_is_never_run(bert_backbone: Path, tmp_path: Path) -> None:
    """A config that points to code in its folder is refused; the code is not run."""
    folder = copy_of(bert_backbone, tmp_path)
    config = {"model_type": "own", "auto_map": {"AutoConfig": "evil.C", "AutoModel": "evil.M"}, "hidden_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(BackboneError, match="can't be loaded"):
        load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_wrong_hash_is_refused(bert_backbone: Path) -> None:
    """The weights must be the ones that the head names."""
    config = config_for(bert_backbone, backbone={"reference": str(bert_backbone), "sha256": "0" * 64})
    with pytest.raises(CheckpointError, match="0000 was expected"):
        Backbone.load(config, device="cpu")


def test_a_backbone_of_another_width_is_refused(bert_backbone: Path) -> None:
    """Both widths are in the error."""
    with pytest.raises(BackboneError, match="has width 32, the head was made for backbone_width 48"):
        Backbone.load(config_for(bert_backbone, backbone_width=48), device="cpu")


def test_identity_follows_weights_config_and_dtype(bert_backbone: Path, tmp_path: Path) -> None:
    """Whatever changes the numbers changes the identity."""
    reference = BackboneReference(reference="x")
    folder = copy_of(bert_backbone, tmp_path)
    found = {identify(folder, reference, torch.float32), identify(folder, reference, torch.bfloat16)}
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    found.add(identify(folder, reference, torch.float32))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes() + b"\0")
    found.add(identify(folder, reference, torch.float32))
    assert len(found) == 4
