"""The vocabulary cut by a rule, on the real Qwen3 tokenizer: every text keeps its bytes, every kept row its bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.conftest import save_qwen3_tokenizer
from tests.tokenalign.compression.models import THIN, qwen35_config, save_random
from tokenalign.compression.bpe import BYTE_CHARACTERS, ByteLevelBpe
from tokenalign.compression.manifest import read_manifest
from tokenalign.compression.model_folder import Source, load_text_model
from tokenalign.compression.scripts import Script
from tokenalign.compression.token_growth import SAMPLES, Growth, read_samples, token_growth
from tokenalign.compression.tokenizer_cut import cut_tokenizer
from tokenalign.compression.vocabulary_rule import Rule, apply_rule
from tokenalign.compression.vocabulary_step import VocabularyCut, cut_vocabulary
from tokenalign.errors import CompressionError
from tokenalign.references import sha256_of

pytestmark = pytest.mark.data

RULE = Rule(8_192, ("Hangul",))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> Path:
    """A thin random Qwen3.5 with a row for each Qwen3 token, and some that no token has."""
    folder = tmp_path_factory.mktemp("whole")
    save_qwen3_tokenizer(data_root, folder)
    config = qwen35_config(4, 151_936, **THIN | {"hidden_size": 8}, eos_token_id=151_645, pad_token_id=151_643)
    return save_random(config, folder)


@pytest.fixture(scope="module")
def small(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, VocabularyCut]:
    """(folder, report) of the model after the cut."""
    folder = tmp_path_factory.mktemp("small") / "model"
    return folder, cut_vocabulary(Source(whole, "whole"), RULE, folder, SAMPLES)


@pytest.fixture(scope="module")
def source_bpe(whole: Path) -> ByteLevelBpe:
    return ByteLevelBpe.read(whole)


@pytest.fixture(scope="module")
def cut_model(source_bpe: ByteLevelBpe) -> dict[str, Any]:
    """Tokens and merges that stay."""
    model: dict[str, Any] = cut_tokenizer(source_bpe, apply_rule(source_bpe, RULE))["model"]
    return model


@pytest.fixture(scope="module")
def before(whole: Path) -> Tokenizer:
    return Tokenizer.from_file(str(whole / "tokenizer.json"))


@pytest.fixture(scope="module")
def after(small: tuple[Path, VocabularyCut]) -> Tokenizer:
    return Tokenizer.from_file(str(small[0] / "tokenizer.json"))


@pytest.fixture(scope="module")
def source_ids(small: tuple[Path, VocabularyCut]) -> list[int]:
    ids: list[int] = json.loads((small[0] / "source_token_ids.json").read_text())
    return ids


def test_each_kept_row_is_its_source_row(whole: Path, small: tuple[Path, VocabularyCut], source_ids: list[int]) -> None:
    """Bit for bit, in the source's dtype, and no other weight changed."""
    old, new = load_text_model(whole).model, load_text_model(small[0]).model
    rows = new.embed_tokens.weight
    assert rows.shape == (len(source_ids), 8)
    assert torch.equal(rows.view(torch.int16), old.embed_tokens.weight[source_ids].view(torch.int16))
    for name, tensor in new.state_dict().items():
        if name != "embed_tokens.weight":
            assert torch.equal(tensor, old.state_dict()[name]), name


def test_the_same_states_for_the_same_tokens(
    whole: Path, small: tuple[Path, VocabularyCut], before: Tokenizer, after: Tokenizer
) -> None:
    """A text of kept tokens gives the very states that it gave before."""
    text = "the new card, 새 카드"
    ids = [torch.tensor([tokenizer.encode(text).ids]) for tokenizer in (before, after)]
    with torch.inference_mode():
        old = load_text_model(whole).model(ids[0]).last_hidden_state
        new = load_text_model(small[0]).model(ids[1]).last_hidden_state
    assert ids[0].shape == ids[1].shape
    assert torch.equal(old, new)


def test_the_rule(small: tuple[Path, VocabularyCut], source_bpe: ByteLevelBpe, source_ids: list[int]) -> None:
    """The first 8,192 ids, all that carries Hangul, 256 bytes and all added tokens are there; the counts add up."""
    kept, hangul = set(source_ids), Script.named("Hangul")
    assert kept >= set(range(8_192)) | set(source_bpe.added.values())
    assert kept >= {source_bpe.vocabulary[character] for character in BYTE_CHARACTERS}
    for token, i in source_bpe.vocabulary.items():
        if hangul.carried_by(bytes(BYTE_CHARACTERS[character] for character in token)):
            assert i in kept, token
    assert source_ids == sorted(kept)
    assert sum(small[1].kept.by_reason.values()) == len(source_ids)
    assert len(kept) < 13_000


def test_entries_of_the_rule(source_bpe: ByteLevelBpe) -> None:
    """On Qwen3's tokenizer, with 32,768: what each part brings that those before it had not."""
    kept = apply_rule(source_bpe, Rule(32_768, ("Hangul",)))
    literal = {"top 32768": 32_768, "script Hangul": 3_792, "bytes": 0, "added tokens": 26}
    assert kept.by_reason == literal | {"Hangul pieces after a space": 60, "parts of these": 0}
    assert apply_rule(source_bpe, Rule(32_768, ("Hangul",), literal=True)).by_reason == literal


def test_every_kept_token_can_come_out(
    source_bpe: ByteLevelBpe, cut_model: dict[str, Any], source_ids: list[int]
) -> None:
    """Each is a byte, an added token, or made by a merge that is still there; literally cut, some are not."""
    made = {left + right for left, right in cut_model["merges"]} | set(BYTE_CHARACTERS)
    assert set(cut_model["vocab"]) == made
    assert len(cut_model["merges"]) == len(source_ids) - 256 - len(source_bpe.added)
    literal = cut_tokenizer(source_bpe, apply_rule(source_bpe, Rule(8_192, ("Hangul",), literal=True)))
    assert set(literal["model"]["vocab"]) - set(BYTE_CHARACTERS) - {a + b for a, b in literal["model"]["merges"]}


def test_merges_keep_their_order(source_bpe: ByteLevelBpe, cut_model: dict[str, Any]) -> None:
    """Those that stay have the rank order of the source, of tokens that stay alone."""
    vocabulary = cut_model["vocab"]
    ranks = {pair: rank for rank, pair in enumerate(source_bpe.merges)}
    found = [ranks[left, right] for left, right in cut_model["merges"]]
    assert found == sorted(found)
    assert all({left, right, left + right} <= vocabulary.keys() for left, right in cut_model["merges"])


SCRIPTS = st.sampled_from(
    [
        "abc xyz",
        "가힣ㅋ 한",
        "中文字",
        "ひらカナ",
        "привет",
        "عربي",
        "हिन्दी",
        "ไทย",
        "😀👩‍👩‍👧",
        "\u0301e",
        "\n\t ",
        "\x00\x7f",
    ]
)
WORDS = st.sampled_from(["the", "card", "is", "not", "here", ",", "123", "카드가", "안", "왔어요", "("])
TEXTS = st.one_of(
    st.text(), st.lists(SCRIPTS, max_size=6).map("".join), st.lists(SCRIPTS.flatmap(st.sampled_from)).map("".join)
)


@settings(max_examples=200)
@given(text=TEXTS)
def test_any_text_comes_back(before: Tokenizer, after: Tokenizer, text: str) -> None:
    """Whatever the script, the cut tokenizer spells what the whole one spells: the text, normalised as both do."""
    old, new = (
        tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        for tokenizer in (before, after)
    )
    assert new == old == before.normalizer.normalize_str(text)


@settings(max_examples=200)
@given(text=st.one_of(TEXTS, st.lists(WORDS).map(" ".join)))
def test_kept_tokens_come_out_as_before(before: Tokenizer, after: Tokenizer, source_ids: list[int], text: str) -> None:
    """A text whose tokens all stayed gives those, renumbered, and no other text does."""
    old, new = before.encode(text).ids, after.encode(text).ids
    assert ([source_ids[i] for i in new] == old) == (set(old) <= set(source_ids))


def test_a_kept_script_is_spelled_as_before(before: Tokenizer, after: Tokenizer, source_ids: list[int]) -> None:
    """Every Korean syllable, alone, after a space and within a word, takes the very tokens that it took."""
    syllables = [chr(code) for code in range(0xAC00, 0xD7A4)]
    texts = [form.format(syllable) for form in ("{}", " {}", "가{}다") for syllable in syllables]
    old, new = (tokenizer.encode_batch_fast(texts) for tokenizer in (before, after))
    different = [text for text, a, b in zip(texts, old, new, strict=True) if a.ids != [source_ids[i] for i in b.ids]]
    assert different == []


def test_control_tokens(whole: Path, small: tuple[Path, VocabularyCut]) -> None:
    """Chat markers and the like keep their names, roles and template, with the ids of their rows."""
    from transformers import AutoTokenizer

    old, new = (AutoTokenizer.from_pretrained(folder) for folder in (whole, small[0]))
    assert len(new) == len(small[1].kept.source_ids)
    assert new.get_added_vocab().keys() == old.get_added_vocab().keys()
    assert (new.eos_token, new.pad_token, new.all_special_tokens) == (
        old.eos_token,
        old.pad_token,
        old.all_special_tokens,
    )
    chat = [{"role": "user", "content": "안녕, hello"}]
    texts = [t.decode(t.apply_chat_template(chat, tokenize=True)["input_ids"]) for t in (old, new)]
    assert texts[0] == texts[1]
    config = load_text_model(small[0]).model.config
    assert (config.vocab_size, config.eos_token_id) == (len(new), new.convert_tokens_to_ids("<|im_end|>"))
    assert config.pad_token_id == new.convert_tokens_to_ids("<|endoftext|>")


def test_transformers_tokenizes_as_the_file_says(small: tuple[Path, VocabularyCut], after: Tokenizer) -> None:
    """AutoTokenizer, which builds a tokenizer of its own from the file, gives the file's ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small[0], trust_remote_code=False)
    for _, text in SAMPLES:
        assert tokenizer(text)["input_ids"] == after.encode(text).ids


def test_growth_by_language(small: tuple[Path, VocabularyCut]) -> None:
    """Korean takes as many tokens as before, Chinese several times as many, and no language fewer."""
    ratios = {one.language: one.ratio for one in small[1].growth}
    assert ratios["Korean"] == 1
    assert ratios["Chinese"] > 2
    assert min(ratios.values()) == 1


def test_growth_sums_a_languages_texts(tmp_path: Path, before: Tokenizer, after: Tokenizer) -> None:
    """The rows of a file, each counted before and after."""
    path = tmp_path / "samples.jsonl"
    rows = [{"language": "x", "text": "the card"}, {"language": "y", "text": "中"}, {"language": "x", "text": "the"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = token_growth(before, after, read_samples(path))
    assert found == [Growth("x", 2, 3, 3), Growth("y", 1, 1, len(after.encode("中").ids))]


def test_manifest(whole: Path, small: tuple[Path, VocabularyCut], source_ids: list[int]) -> None:
    """Rule, counts, and the hash of every file read and written."""
    manifest = read_manifest(small[0])
    assert manifest is not None
    (step,) = manifest["steps"]
    assert step["rule"] == {"top": 8_192, "scripts": ["Hangul"], "literal": False}
    assert step["entries"]["after"] == step["counts"]["rows"] == len(source_ids)
    assert step["sources"]["source"]["files"]["tokenizer.json"] == sha256_of(whole / "tokenizer.json")
    assert manifest["files"].keys() == {
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "source_token_ids.json")
    }


def test_other_tokenizers_are_refused(bert_backbone: Path, tmp_path: Path) -> None:
    """WordPiece has no bytes to fall back to."""
    with pytest.raises(CompressionError, match="WordPiece"):
        cut_vocabulary(Source(bert_backbone, "bert"), RULE, tmp_path / "small", SAMPLES)
    assert not (tmp_path / "small").exists()


def test_a_tokenizer_of_another_model_is_refused(data_root: Path, tmp_path: Path) -> None:
    """Rows that the model hasn't can't be kept."""
    (tmp_path / "whole").mkdir()
    save_qwen3_tokenizer(data_root, tmp_path / "whole")
    save_random(qwen35_config(1, 1_000, **THIN), tmp_path / "whole")
    with pytest.raises(CompressionError, match="don't belong together"):
        cut_vocabulary(Source(tmp_path / "whole", "whole"), RULE, tmp_path / "small", SAMPLES)


def test_a_control_token_that_would_go(whole: Path, tmp_path: Path) -> None:
    """A configuration that names a token outside of the rule isn't left pointing at another one's row."""
    from shutil import copytree

    copytree(whole, tmp_path / "whole")
    path = tmp_path / "whole" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 100_000}))
    with pytest.raises(CompressionError, match="eos_token_id"):
        cut_vocabulary(Source(tmp_path / "whole", "whole"), RULE, tmp_path / "small", SAMPLES)
