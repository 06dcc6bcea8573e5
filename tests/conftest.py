"""Fixtures for all tests: tiny random-weight models on disk, built once a session, and the data folder."""

import gzip
import json
import os
import shutil
import string
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Threads that wait for each other by spinning make torch many times slower on a machine that does other things too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

DATA_ROOT = Path(__file__).parents[2] / "shared" / "data"

# A loaded machine must not turn a slow example into a failure; what a property finds it finds again.
settings.register_profile("tokenalign", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("tokenalign")

MakeHead = Callable[..., Path]


@pytest.hookimpl(wrapper=True)  # around xdist, which reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """What starts Ray is one group: one process runs it in turn, the others all the rest beside it (`make test`)."""
    starting = [item for item in items if item.get_closest_marker("serve") is not None]
    for item in starting:
        item.add_marker(pytest.mark.xdist_group("ray"))
    yield
    grouped = not getattr(config.option, "loadgroup", False) or all(item.nodeid.endswith("@ray") for item in starting)
    assert grouped, "this version of pytest-xdist keeps no groups with this one of pytest: applications would collide"


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder with the data sets; a test that needs it is skipped without it, but fails under CI=true."""
    if not DATA_ROOT.is_dir():
        reason = f"the data folder {DATA_ROOT} is absent"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}, and CI must not skip what needs it")
        pytest.skip(reason)
    return DATA_ROOT


@pytest.fixture(scope="session")
def bert_backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a BERT of width 32 with random weights and a WordPiece tokenizer of letters and a few words."""
    import torch
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("bert")
    vocabulary = save_word_piece_tokenizer(folder)
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=160,
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def qwen3_backbone(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> Path:
    """The folder of a Qwen3 of width 32 with random weights and the real Qwen3 tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3Model

    folder = tmp_path_factory.mktemp("qwen3")
    save_qwen3_tokenizer(data_root, folder)
    torch.manual_seed(2)
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
    )
    Qwen3Model(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def word_piece_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Qwen3 as wide as Qwen3-1.7B, one thin layer deep, with random weights and a small vocabulary."""
    import torch
    from transformers import Qwen3Config, Qwen3Model

    folder = tmp_path_factory.mktemp("wide-qwen3")
    vocabulary = save_word_piece_tokenizer(folder)
    torch.manual_seed(4)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=2_048,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=160,
    )
    Qwen3Model(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def qwen35_backbone(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> Path:
    """The folder of a Qwen3.5 text model of width 64, linear and full attention in turn, with the Qwen3 tokenizer."""
    import torch
    from transformers import Qwen3_5TextConfig, Qwen3_5TextModel

    folder = tmp_path_factory.mktemp("qwen35")
    save_qwen3_tokenizer(data_root, folder)
    torch.manual_seed(3)
    config = Qwen3_5TextConfig(
        vocab_size=151_936,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        max_position_embeddings=512,
    )
    Qwen3_5TextModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_head(tmp_path_factory: pytest.TempPathFactory) -> MakeHead:
    """Makes the folder of a random head that fits a backbone's folder; keywords override its configuration."""

    def make(folder: Path, /, *, seed: int = 0, **overrides: Any) -> Path:
        import torch

        from tokenalign.config import ModelConfig
        from tokenalign.head import AlignmentHead
        from tokenalign.references import sha256_of
        from tokenalign.weights import save_head

        values: dict[str, Any] = {
            "name": f"tiny-{folder.name}",
            "backbone": {"reference": str(folder), "sha256": sha256_of(folder / "model.safetensors")},
            "backbone_width": json.loads((folder / "config.json").read_text())["hidden_size"],
            "width": 32,
            "ffn_width": 64,
        }
        config = ModelConfig.parse(values | overrides)
        torch.manual_seed(seed)
        head = tmp_path_factory.mktemp("head")
        save_head(head, config, AlignmentHead(config))
        return head

    return make


@pytest.fixture(scope="session")
def bert_head(bert_backbone: Path, make_head: MakeHead) -> Path:
    """The folder of a random head on the tiny BERT."""
    return make_head(bert_backbone)


@pytest.fixture(scope="session")
def qwen3_head(qwen3_backbone: Path, make_head: MakeHead) -> Path:
    """The folder of a random head on the tiny Qwen3, with templates as the released head has them."""
    return make_head(qwen3_backbone, label_template="The customer's banking issue concerns {label}.")


@pytest.fixture(scope="session")
def qwen35_head(qwen35_backbone: Path, make_head: MakeHead) -> Path:
    """The folder of a random head on the tiny Qwen3.5."""
    return make_head(qwen35_backbone)


def save_word_piece_tokenizer(folder: Path) -> int:
    """The size of the vocabulary of the uncased WordPiece tokenizer that is written to `folder`."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    characters = string.ascii_lowercase + string.digits
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = ["card", "payment", "was", "charged", "twice", "cash", "not", "received", "declined", "##ing", "##ed"]
    tokens = [*specials, *characters, *(f"##{c}" for c in characters), *string.punctuation, *words]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    )
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    ).save_pretrained(folder)
    return len(vocabulary)


def save_qwen3_tokenizer(data_root: Path, folder: Path) -> None:
    """Write the real Qwen3 tokenizer to `folder`."""
    source = data_root / "qwen3-tokenizer"
    shutil.copy(source / "tokenizer_config.json", folder)
    (folder / "tokenizer.json").write_bytes(gzip.decompress((source / "tokenizer.json.gz").read_bytes()))
