"""Layers left out: what stays is the source's own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tokenalign.compression.models import THIN, qwen35_config, save_random
from tokenalign.compression.layer_step import cut_layers
from tokenalign.compression.layers import CARD_LAYERS, check_layers, keep_layers, kept_config
from tokenalign.compression.manifest import read_manifest
from tokenalign.compression.model_folder import Source, find_folder, load_text_model, save_text_model, text_config
from tokenalign.errors import BackboneError, CompressionError
from tokenalign.references import sha256_of

MAP = CARD_LAYERS[24]


def test_kept_layers_are_bit_identical(thin24: Path, tmp_path: Path) -> None:
    """Every tensor of the written model is the source's of the kept layer; nothing else is in the file."""
    counts = cut_layers(Source(thin24, "thin24"), MAP, tmp_path / "kept")
    source = load_text_model(thin24).model.state_dict()
    kept = load_text_model(tmp_path / "kept").model.state_dict()
    assert counts.layers == 8
    for name, tensor in kept.items():
        if name.startswith("layers."):
            place, rest = name.removeprefix("layers.").split(".", 1)
            name = f"layers.{MAP[int(place)]}.{rest}"
        assert torch.equal(tensor, source[name]), name
    assert {name.split(".")[1] for name in kept if name.startswith("layers.")} == {str(i) for i in range(8)}


def test_the_kept_model_runs_them_in_order(thin24: Path, tmp_path: Path) -> None:
    """Its states are those of the source's layers called one after the other: their types went with them."""
    source = load_text_model(thin24, torch.float32)
    kept = keep_layers(source, (0, 3, 5))
    assert kept.model.config.layer_types == ["linear_attention", "full_attention", "linear_attention"]
    model, ids = source.model, torch.arange(2, 14)[None]
    positions = torch.arange(12)[None, None].expand(3, 1, -1)
    with torch.inference_mode():
        states = model.embed_tokens(ids)
        turns = model.rotary_emb(states, positions)
        causal = torch.full((12, 12), -torch.inf).triu(1)[None, None]
        for i in (0, 3, 5):
            mask = causal if model.config.layer_types[i] == "full_attention" else None
            states = model.layers[i](states, position_embeddings=turns, attention_mask=mask)
        expected = model.norm(states)
        save_text_model(tmp_path, kept)
        got = load_text_model(tmp_path).model(ids).last_hidden_state
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_the_folder_loads_as_the_cards_do(thin24: Path, tmp_path: Path) -> None:
    """AutoModel gives a headless Qwen3_5TextModel in bfloat16."""
    from transformers import AutoModel

    cut_layers(Source(thin24, "thin24"), MAP, tmp_path / "kept")
    model, report = AutoModel.from_pretrained(
        tmp_path / "kept", trust_remote_code=False, dtype="auto", output_loading_info=True
    )
    assert (type(model).__name__, model.dtype) == ("Qwen3_5TextModel", torch.bfloat16)
    assert not report["missing_keys"] | report["unexpected_keys"]


def test_manifest(thin24: Path, tmp_path: Path) -> None:
    """It names map, counts, and the hash of every file read and written; a second step's manifest holds the first's."""
    cut_layers(Source(thin24, "some/where", "abc"), MAP, tmp_path / "eight")
    cut_layers(Source(tmp_path / "eight", "eight"), CARD_LAYERS[8], tmp_path / "six")
    manifest = read_manifest(tmp_path / "six")
    assert manifest is not None
    first, second = manifest["steps"]
    assert (first["layers"], second["layers"]) == (list(MAP), list(CARD_LAYERS[8]))
    assert first["sources"]["source"]["reference"] == "some/where"
    assert first["sources"]["source"]["files"]["model.safetensors"] == sha256_of(thin24 / "model.safetensors")
    assert manifest["files"] == {
        name: sha256_of(tmp_path / "six" / name) for name in ("config.json", "model.safetensors")
    }
    assert second["counts"]["file_bytes"] == (tmp_path / "six" / "model.safetensors").stat().st_size


def test_an_altered_source_is_refused(thin24: Path, tmp_path: Path) -> None:
    """A step reads no folder whose files aren't those of its manifest."""
    cut_layers(Source(thin24, "thin24"), MAP, tmp_path / "eight")
    config = tmp_path / "eight" / "config.json"
    config.write_text(config.read_text().replace("{", "{ ", 1))
    with pytest.raises(CompressionError, match=r"config\.json is not the file that .* names"):
        cut_layers(Source(tmp_path / "eight", "eight"), CARD_LAYERS[8], tmp_path / "six")
    assert not (tmp_path / "six").exists()


def test_a_used_folder_is_refused(thin24: Path, tmp_path: Path) -> None:
    """Nothing is written over."""
    (tmp_path / "note").touch()
    with pytest.raises(CompressionError, match="fresh --output"):
        cut_layers(Source(thin24, "thin24"), MAP, tmp_path)


@pytest.mark.parametrize("kept", [(), (0, 0), (4, 2), (-1, 2), (0, 24)])
def test_layers_that_cant_be(kept: tuple[int, ...]) -> None:
    """Empty, twice, in falling order or out of the model: the error says what may be."""
    with pytest.raises(CompressionError, match="from 0 to 23"):
        check_layers(kept, 24)


def test_other_settings_by_layer_are_refused() -> None:
    """A list for each layer that isn't known would be of the wrong layers, so it is no guess."""
    config = qwen35_config(4, 10, **THIN)
    config.no_rope_layers = [1, 0, 1, 0]
    with pytest.raises(CompressionError, match="no_rope_layers"):
        kept_config(config, (0, 2))


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )


def _bert() -> Any:
    from transformers import BertConfig

    return BertConfig(vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2)


@pytest.mark.parametrize("config", [_qwen3(), _bert()], ids=["qwen3", "bert"])
def test_other_architectures(config: Any, tmp_path: Path) -> None:
    """Qwen3 and BERT lose layers the same way, whatever their list is called."""
    cut_layers(Source(save_random(config, tmp_path / "whole"), "whole"), (0, 3), tmp_path / "kept")
    whole, kept = load_text_model(tmp_path / "whole").model, load_text_model(tmp_path / "kept").model
    assert kept.config.num_hidden_layers == 2
    last = [dict(model.named_modules()) for model in (whole, kept)]
    prefix = "encoder.layer" if config.model_type == "bert" else "layers"
    for name, tensor in last[1][f"{prefix}.1"].state_dict().items():
        assert torch.equal(tensor, last[0][f"{prefix}.3"].state_dict()[name])


def test_what_a_file_lacks_is_not_made_up(tmp_path: Path) -> None:
    """A BERT without pooler stays without, where random numbers would make every file another one."""
    from safetensors import safe_open
    from transformers import BertModel

    BertModel(_bert(), add_pooling_layer=False).save_pretrained(tmp_path / "whole")
    cut_layers(Source(tmp_path / "whole", "whole"), (1, 2), tmp_path / "kept")
    with safe_open(tmp_path / "kept" / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if name.startswith("pooler")]  # noqa: SIM118


def test_shared_layers_are_refused(tmp_path: Path) -> None:
    """ALBERT has one layer that it runs many times, so there is none to leave out."""
    from transformers import AlbertConfig

    config = AlbertConfig(
        vocab_size=30,
        embedding_size=8,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=32,
        num_hidden_layers=4,
    )
    with pytest.raises(CompressionError, match="no list of its 4 layers"):
        cut_layers(Source(save_random(config, tmp_path / "whole"), "whole"), (0, 1), tmp_path / "kept")


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    """T5 has two stacks."""
    from transformers import T5Config

    T5Config(vocab_size=30, d_model=16, num_layers=2).save_pretrained(tmp_path)
    with pytest.raises(BackboneError, match="encoder-decoder"):
        text_config(tmp_path)


def test_the_text_part_of_a_model_that_sees(tmp_path: Path) -> None:
    """The released Qwen3.5 reads images too: its text model alone is taken, without head and without vision."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = qwen35_config(4, 80, **THIN).to_dict()
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config=text, vision_config=vision)
    torch.manual_seed(3)
    whole = Qwen3_5ForConditionalGeneration(config)
    whole.save_pretrained(tmp_path / "whole")
    cut_layers(Source(tmp_path / "whole", "whole"), (0, 3), tmp_path / "kept", None)
    kept = load_text_model(tmp_path / "kept").model
    assert type(kept).__name__ == "Qwen3_5TextModel"
    layers = whole.model.language_model.layers
    assert torch.equal(kept.layers[1].self_attn.q_proj.weight, layers[3].self_attn.q_proj.weight)


def test_a_hub_id_needs_its_commit() -> None:
    """A model that moves would give another student each time."""
    with pytest.raises(BackboneError, match="needs --revision"):
        find_folder("Qwen/Qwen3.5-0.8B", weights=False, local_files_only=True)
