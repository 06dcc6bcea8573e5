"""Parameters and bytes, beside what the Qwen3.5 cards publish, at full size and without weights."""

from pathlib import Path

import pytest
import torch

from tests.tokenalign.compression.models import FULL, qwen35_config, save_random
from tokenalign.compression.counting import Counts, count
from tokenalign.compression.layers import CARD_LAYERS, kept_config

ROWS = 248_320


def down_the_ladder(rows: int, *, to: int) -> Counts:
    """The counts after the cards' cuts from 24 layers to `to`."""
    config = qwen35_config(24, rows, **FULL)
    while config.num_hidden_layers > to:
        config = kept_config(config, CARD_LAYERS[config.num_hidden_layers])
    return count(config)


@pytest.mark.parametrize(
    ("rows", "parameters", "file_bytes"),
    [(ROWS, 334_096_704, 668_198_976), (39_866, 120_639_808, 241_285_160)],
)
def test_the_cards_four_layers(rows: int, parameters: int, file_bytes: int) -> None:
    """24 -> 8 -> 6 -> 4 by the cards' maps gives their layer types, parameters, and bytes of the file to the byte."""
    counts = down_the_ladder(rows, to=4)
    assert counts.layer_types == ("linear_attention", "full_attention", "linear_attention", "full_attention")
    assert (counts.parameters, counts.file_bytes) == (parameters, file_bytes)


def test_the_card_of_128000_rows() -> None:
    """Its parameters agree; its file is 32 bytes longer, all of them in the header, whose size is a multiple of 8."""
    counts = down_the_ladder(128_000, to=4)
    assert counts.parameters == 210_889_024
    assert 421_783_648 - counts.file_bytes == 32


def test_where_the_parameters_live() -> None:
    """752M of 24 layers, a third of it the embedding; 498M of layers become 80M, and the share 76.1 %, then a third."""
    whole, four, small = down_the_ladder(ROWS, to=24), down_the_ladder(ROWS, to=4), down_the_ladder(39_866, to=4)
    assert [round(counts.parameters / 1e6) for counts in (whole, four)] == [752, 334]
    assert [round(counts.stack_parameters / 1e6) for counts in (whole, four)] == [498, 80]
    assert [round(counts.embedding_share, 3) for counts in (whole, four, small)] == [0.338, 0.761, 0.338]
    assert four.embedding_parameters == 254_279_680


def test_weight_files_of_every_depth() -> None:
    """1,435, 802 and 637 MiB with 248,320 rows, as the card lists them; of six layers 719.5, where it has 720."""
    sizes = [down_the_ladder(ROWS, to=layers).file_bytes / 2**20 for layers in (24, 8, 6, 4)]
    assert [round(size) for size in sizes] == [1_435, 802, 719, 637]
    assert sizes[2] == pytest.approx(720, abs=0.6)


def test_recurrent_scalars() -> None:
    """The six linear layers of the eight hold 192 of them."""
    assert down_the_ladder(ROWS, to=8).recurrent_scalars == 192


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_are_those_of_the_file(thin24: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """The size that is worked out is the size of what transformers writes."""
    from transformers import AutoConfig, AutoModel

    AutoModel.from_pretrained(thin24, dtype=dtype).save_pretrained(tmp_path)
    counts = count(AutoConfig.from_pretrained(thin24), dtype)
    assert (tmp_path / "model.safetensors").stat().st_size == counts.file_bytes


def test_other_architectures_are_counted(tmp_path: Path) -> None:
    """A BERT has layers of one type, and no recurrent scalars."""
    from transformers import AutoModel, BertConfig

    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32)
    counts = count(config)
    model = AutoModel.from_pretrained(save_random(config, tmp_path))
    assert counts.parameters == sum(p.numel() for p in model.parameters())
    assert (counts.layers, counts.layer_types, counts.rows, counts.recurrent_scalars) == (3, None, 50, 0)
