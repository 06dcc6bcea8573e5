"""From text to tokens: what is scored, what was cut, and that no text becomes a control token."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tokenalign.config import ModelConfig
from tokenalign.errors import BackboneError, ConfigError, InputError
from tokenalign.text import TextTokenizer, TokenizedTexts, Truncation

NORMAL_TEXTS = [
    "I was charged twice for the same card payment.",
    "cash",
    "  leading, trailing and   inner spaces\n\ttabs ",
    "It's $5 + 3% — “why”?",
    "naïve café ñandú",
    "日本語のテキスト",
    "\u200fשלום עולם",
    "مرحبا بالعالم",
    "नमस्ते दुनिया",
    "ok 😀👍🏽 fine",
    "a\u200bb",
    "x" * 150,
    "word " * 400,
]


def load(folder: Path, **changes: Any) -> TextTokenizer:
    values = {"backbone": {"reference": str(folder)}, "backbone_width": 32}
    return TextTokenizer.load(folder, ModelConfig.parse(values | changes))


@pytest.fixture(scope="session")
def reference(tokenizer_folder: Path) -> Any:
    """The library's own tokenizer of the same folder."""
    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(scope="session")
def qwen3_tokenizer(qwen3_backbone: Path) -> TextTokenizer:
    """The byte-level tokenizer without templates."""
    return load(qwen3_backbone)


def kept_words(tokenized: TokenizedTexts, texts: list[str], index: int = 0) -> list[str]:
    """The slices of the text that the scored tokens stand for."""
    return [texts[index][a:b] for a, b in tokenized.kept_spans(index).tolist()]


def kept(tokenizer: TextTokenizer, text: str) -> list[str]:
    return kept_words(tokenizer.documents([text]), [text])


@pytest.mark.parametrize("text", NORMAL_TEXTS)
def test_ids_are_the_libraries(any_tokenizer: TextTokenizer, reference: Any, text: str) -> None:
    """Normal texts get the very ids of AutoTokenizer, truncated as it does."""
    expected = reference(text, truncation=True, max_length=128)["input_ids"]
    assert any_tokenizer.documents([text]).tokens.values.tolist() == expected


def test_batch_is_text_by_text(any_tokenizer: TextTokenizer) -> None:
    """A text has the same tokens, spans and truncation alone and among others."""
    together = any_tokenizer.documents(NORMAL_TEXTS)
    offsets = together.tokens.offsets
    for i, text in enumerate(NORMAL_TEXTS):
        alone = any_tokenizer.documents([text])
        run = slice(offsets[i], offsets[i + 1])
        assert together.tokens.values[run].tolist() == alone.tokens.values.tolist()
        assert together.tokens.keep[run].tolist() == alone.tokens.keep.tolist()
        assert together.spans[run].tolist() == alone.spans.tolist()
        assert together.truncations[i] == alone.truncations[0]


def test_words_are_kept_and_punctuation_is_not(bert_tokenizer: TextTokenizer) -> None:
    """Special tokens and pure punctuation are context; words, digits, `$` and `+` are scored."""
    assert kept(bert_tokenizer, "card, payment? $5 + 3%!") == ["card", "payment", "$", "5", "+", "3"]


@pytest.mark.data
def test_byte_level_tokens_with_a_space(qwen3_tokenizer: TextTokenizer) -> None:
    """A token such as " ?" is white space and punctuation, so it is not scored; " $" is."""
    assert kept(qwen3_tokenizer, "pay ? $ now !") == ["pay", " $", " now"]


@pytest.mark.parametrize("text", ["???", "!", "—…", "¿?", "( )"])
def test_punctuation_alone_is_scored(any_tokenizer: TextTokenizer, text: str) -> None:
    """Where nothing else is there, every token of the user's text is scored."""
    words = kept(any_tokenizer, text)
    assert "".join(words).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize("text", ["😀", "😀👍🏽", "🇨🇭", "👨‍👩‍👧"])
def test_emoji_alone_are_scored(any_tokenizer: TextTokenizer, text: str) -> None:
    """Emoji are no punctuation; all of the text is covered."""
    spans = any_tokenizer.documents([text]).kept_spans(0)
    assert (spans[:, 0].min(), spans[:, 1].max()) == (0, len(text))


def test_zero_width_space_without_any_token(bert_tokenizer: TextTokenizer) -> None:
    """A text of which the tokenizer leaves nothing is an input error at its place, whatever stands beside it."""
    with pytest.raises(InputError, match="no character that the tokenizer can read") as caught:
        bert_tokenizer.documents(["card", "\u200b"])
    assert caught.value.loc == ("texts", 1)
    with pytest.raises(InputError) as caught:
        bert_tokenizer.labels(["\u200b"], ("labels",))
    assert caught.value.loc == ("labels", 0)


def test_a_template_does_not_hide_an_empty_text(bert_backbone: Path) -> None:
    """Boilerplate never stands in for the user's text."""
    with pytest.raises(InputError):
        load(bert_backbone, document_template="the card {text} was").documents(["\u200b"])


def test_cjk_is_character_by_character(any_tokenizer: TextTokenizer) -> None:
    """The spans of a text without spaces cover it without a gap."""
    spans = any_tokenizer.documents(["日本語カード"]).kept_spans(0).tolist()
    assert spans[0][0] == 0
    assert spans[-1][1] == 6
    assert all(b[0] <= a[1] for a, b in pairwise(spans))


def test_right_to_left_text_is_in_logical_order(any_tokenizer: TextTokenizer) -> None:
    """Spans are code points of the text as sent, the first word first."""
    words = kept(any_tokenizer, "שלום card עולם")
    assert "".join(words).replace(" ", "") == "שלוםcardעולם"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cafe\u0301 ole\u0301!", ["cafe\u0301", "ole\u0301"]),
        ("ole\u0301", ["ole\u0301"]),
        ("ni\u0303o\u0308\u0304 a", ["ni\u0303o\u0308\u0304", "a"]),
        ("\u1112\u1161\u11ab card", ["\u1112\u1161\u11ab", "card"]),
    ],
)
def test_combining_marks_stay_with_their_letter(any_tokenizer: TextTokenizer, text: str, words: list[str]) -> None:
    """A mark that the tokenizer composes or drops belongs to the token before it, so words come back whole."""
    spans = dict.fromkeys((a, b) for a, b in any_tokenizer.documents([text]).kept_spans(0).tolist())
    assert "".join(text[a:b] for a, b in spans).replace(" ", "") == "".join(words)


@pytest.mark.data
def test_an_unread_mark_is_not_claimed(qwen3_backbone: Path) -> None:
    """Where a mark is a token of its own, and the first that was cut, it is not taken for its letter's."""
    text = "a b c \u05e9\u05b8"
    tokenized = load(qwen3_backbone, max_length=4).documents([text])
    assert tokenized.truncations == (Truncation(6, 4, 7),)
    assert tokenized.spans.max() == 7


def test_marks_before_the_cut_are_taken_in(bert_tokenizer: TextTokenizer) -> None:
    """The last letter that was read has its mark."""
    text = "a\u0301 " * 200
    tokenized = bert_tokenizer.documents([text])
    cut = tokenized.truncations[0]
    assert cut is not None
    assert tokenized.spans.max() == cut.cut_at - 1
    assert cut.cut_at == 3 * 126


def test_a_mark_alone(any_tokenizer: TextTokenizer) -> None:
    """A combining mark without a letter is scored, or refused where the tokenizer drops it."""
    try:
        tokenized = any_tokenizer.documents(["\u0301"])
    except InputError:
        return
    assert kept_words(tokenized, ["\u0301"]) == ["\u0301"]


def test_decomposed_text_reads_like_composed(any_tokenizer: TextTokenizer) -> None:
    """Both forms of é give the same ids, so labels in both forms would tie, and are seen as equal."""
    assert any_tokenizer.documents(["caf\u00e9", "cafe\u0301"]).equal_sequences() == [(0, 1)]


CONTROL_STRINGS = ["[SEP]", "[CLS]", "[PAD]", "[MASK]", "<|endoftext|>", "<|im_start|>", "<think>", "</think>"]
CONTROL_STRINGS += ["<tool_call>", "</tool_call>", "<|vision_start|>", "<tool_response>", "<|fim_prefix|>"]


@pytest.mark.parametrize("control", CONTROL_STRINGS)
def test_control_strings_stay_text(any_tokenizer: TextTokenizer, reference: Any, control: str) -> None:
    """No id of an added token comes from a user's text; only the frame that the tokenizer itself adds is special."""
    text = f"card {control}payment{control} {control}"
    control_ids = set(reference.added_tokens_decoder) - {reference.unk_token_id}
    frame = reference.num_special_tokens_to_add()
    ids = any_tokenizer.documents([text]).tokens.values.tolist()
    inside = ids[frame // 2 : len(ids) - (frame - frame // 2)]
    assert control_ids.isdisjoint(inside)
    assert "".join(kept(any_tokenizer, f"{control}x")).endswith("x")


def test_every_added_token_is_plain_text(any_tokenizer: TextTokenizer, reference: Any) -> None:
    """Also those that are not special, and glued to words."""
    added = {i: token.content for i, token in reference.added_tokens_decoder.items() if i != reference.unk_token_id}
    assert len(added) >= 4
    ids = any_tokenizer.documents([f"a{content}b" for content in added.values()]).tokens
    frame = set(reference("").input_ids)
    assert (set(ids.values.tolist()) & set(added)) <= frame


@pytest.mark.data
def test_the_check_above_can_fail(qwen3_backbone: Path) -> None:
    """The library's own tokenizer does turn the text `<think>` into a control token, even with split_special_tokens."""
    reference = AutoTokenizer.from_pretrained(qwen3_backbone)
    ids = reference("<think>", split_special_tokens=True)["input_ids"]
    assert ids == [reference.convert_tokens_to_ids("<think>")]


@pytest.mark.data
def test_a_control_string_is_its_characters(qwen3_backbone: Path, qwen3_tokenizer: TextTokenizer) -> None:
    """`<think>` becomes the tokens that its characters have, which decode to it."""
    ids = qwen3_tokenizer.documents(["<think>"]).tokens.values.tolist()
    assert len(ids) > 1
    assert AutoTokenizer.from_pretrained(qwen3_backbone).decode(ids) == "<think>"


def test_boilerplate_is_context_only(tokenizer_folder: Path, any_tokenizer: TextTokenizer) -> None:
    """The template's words have tokens, and only the user's are scored, with spans in the user's text."""
    text = "cash declined"
    tokenized = load(tokenizer_folder, label_template="The banking issue concerns {label}.").labels([text])
    assert tokenized.tokens.lengths[0] > any_tokenizer.labels([text]).tokens.lengths[0]
    assert "".join(kept_words(tokenized, [text])).replace(" ", "") == "cashdeclined"


def test_documents_and_labels_have_their_own_template(tokenizer_folder: Path) -> None:
    """Each side its own."""
    tokenizer = load(tokenizer_folder, document_template="{text}", label_template="about {label}")
    assert tokenizer.documents(["card"]).tokens.lengths[0] < tokenizer.labels(["card"]).tokens.lengths[0]


def test_punctuation_in_a_template_is_not_scored(tokenizer_folder: Path) -> None:
    """ "???" in a template: the user's question marks are scored, the template's are not."""
    tokenizer = load(tokenizer_folder, document_template="? {text} ?")
    assert "".join(kept(tokenizer, "??")).strip() == "??"


def test_a_token_across_text_and_template_is_kept_and_clipped(tokenizer_folder: Path) -> None:
    """Where template and text share a token, it is scored, and its span ends with the user's text."""
    tokenizer = load(tokenizer_folder, document_template="ca{text}ed card")
    words = kept(tokenizer, "sh")
    assert "".join(words) == "sh"
    spans = tokenizer.documents(["sh"]).kept_spans(0)
    assert spans.min() >= 0
    assert spans.max() <= 2


@pytest.mark.parametrize("key", ["document_template", "label_template"])
@pytest.mark.parametrize("control", ["[SEP]", "[CLS]"])
def test_a_template_with_a_control_token_is_refused(bert_backbone: Path, key: str, control: str) -> None:
    """Templates are plain words; the error names key and token."""
    field = "{text}" if key == "document_template" else "{label}"
    with pytest.raises(ConfigError) as caught:
        load(bert_backbone, **{key: f"{control} {field}"})
    assert key in str(caught.value)
    assert control in str(caught.value)


def test_a_template_longer_than_the_model_reads_is_refused(bert_backbone: Path) -> None:
    """There must be room for at least something of the user's."""
    with pytest.raises(ConfigError, match="label_template: takes"):
        load(bert_backbone, label_template="card " * 200 + "{label}")


@pytest.mark.parametrize("count", [127, 128, 129])
def test_texts_around_the_limit(any_tokenizer: TextTokenizer, reference: Any, count: int) -> None:
    """127 and 128 tokens are read whole; of 129 one is cut, and the report says where."""
    text = " ".join(["card"] * (count - reference.num_special_tokens_to_add()))
    tokenized = any_tokenizer.documents([text])
    assert len(reference(text)["input_ids"]) == count
    assert tokenized.tokens.lengths[0] == min(count, 128)
    if count <= 128:
        assert tokenized.truncations == (None,)
    else:
        cut = tokenized.truncations[0]
        assert cut is not None
        assert (cut.tokens, cut.used) == (129, 128)
        assert text[cut.cut_at :].strip() == "card"


def test_truncation_counts_the_template(bert_backbone: Path) -> None:
    """The limit includes template and special tokens; `cut_at` is a position of the user's text."""
    tokenizer = load(bert_backbone, max_length=8, document_template="card cash {text} not")
    tokenized = tokenizer.documents(["payment twice", "a b c d e", "a b c d e f"])
    assert tokenized.truncations == (None, Truncation(10, 8, 8), Truncation(11, 8, 8))
    assert kept_words(tokenized, ["", "a b c d e", ""], 1) == ["a", "b", "c", "d"]


def test_only_boilerplate_was_cut(bert_backbone: Path) -> None:
    """When no more than the template's end is lost, the cut is at the end of the text."""
    tokenized = load(bert_backbone, max_length=5, document_template="{text} was not").documents(["card cash"])
    assert tokenized.truncations == (Truncation(6, 5, 9),)


def test_special_tokens_survive_the_cut(bert_backbone: Path) -> None:
    """A cut text ends with [SEP], as the encoder was trained."""
    reference = AutoTokenizer.from_pretrained(bert_backbone)
    ids = load(bert_backbone, max_length=6).documents(["card " * 50]).tokens.values.tolist()
    assert (ids[0], ids[-1], len(ids)) == (reference.cls_token_id, reference.sep_token_id, 6)


@pytest.mark.data
def test_a_character_of_several_tokens(qwen3_tokenizer: TextTokenizer) -> None:
    """A character that takes several byte tokens is their common span."""
    text = "\u05b8 \U0001fadf"
    spans = qwen3_tokenizer.documents([text]).kept_spans(0).tolist()
    assert len(spans) > len({tuple(span) for span in spans})
    assert all(0 <= a < b <= len(text) for a, b in spans)


@pytest.fixture(scope="session", params=["plain", "framed"])
def any_frame(request: pytest.FixtureRequest, tokenizer_folder: Path, any_tokenizer: TextTokenizer) -> TextTokenizer:
    """Both tokenizers without a template, and with one whose words run into the text's, of which most are cut."""
    if request.param == "plain":
        return any_tokenizer
    return load(tokenizer_folder, document_template="ca{text}ed? [card", max_length=16)


PIECES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12),
    st.sampled_from([*CONTROL_STRINGS, " ", "card", "?!", "e\u0301", "\u200b"]),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(texts=st.lists(st.lists(PIECES, min_size=1, max_size=5).map("".join), min_size=1, max_size=4))
def test_any_text_has_sound_spans(any_frame: TextTokenizer, reference: Any, texts: list[str]) -> None:
    """Every scored token covers a piece of its own text, in order; none is a control token; a cut is told as it is.

    A text without any token is the named error.
    """
    try:
        tokenized = any_frame.documents(texts)
    except InputError as error:
        assert error.loc[0] == "texts"  # noqa: PT017  both outcomes are right, each has its conditions
        return
    offsets = tokenized.tokens.offsets
    control_ids = np.array(sorted(set(reference.added_tokens_decoder) - {reference.unk_token_id}))
    assert not np.isin(tokenized.tokens.values[tokenized.tokens.keep], control_ids).any()
    for i, text in enumerate(texts):
        spans = tokenized.kept_spans(i)
        assert len(spans) > 0
        assert ((spans[:, 0] >= 0) & (spans[:, 0] < spans[:, 1]) & (spans[:, 1] <= len(text))).all()
        assert (spans[1:, 0] >= spans[:-1, 0]).all()
        everything = tokenized.spans[offsets[i] : offsets[i + 1]]
        frame = reference.num_special_tokens_to_add()
        inside = tokenized.tokens.values[offsets[i] : offsets[i + 1]][frame // 2 : -(frame - frame // 2) or None]
        assert not np.isin(inside, control_ids).any()
        cut = tokenized.truncations[i]
        if cut is not None:
            assert cut.tokens > cut.used == len(everything)
            assert spans[:, 0].max() <= cut.cut_at <= len(text)


def test_no_texts(any_tokenizer: TextTokenizer) -> None:
    """An empty list gives an empty batch."""
    assert len(any_tokenizer.documents([]).tokens) == 0


def test_a_slow_tokenizer_or_none_is_refused(tmp_path: Path) -> None:
    """A folder without tokenizer files says so."""
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(BackboneError, match="tokenizer in"):
        load(tmp_path)


def test_a_broken_tokenizer_file_is_refused(bert_backbone: Path, tmp_path: Path) -> None:
    """A cut tokenizer.json is a BackboneError, not whatever the parser raises."""
    (tmp_path / "tokenizer_config.json").write_bytes((bert_backbone / "tokenizer_config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0",')
    with pytest.raises(BackboneError, match="tokenizer in"):
        load(tmp_path)


def test_digest_names_the_tokenizer_not_its_settings(bert_backbone: Path, qwen3_backbone: Path) -> None:
    """Templates and max_length have their own place in a fingerprint; another vocabulary is another digest."""
    assert load(bert_backbone).digest == load(bert_backbone, max_length=9, label_template="x {label}").digest
    assert load(bert_backbone).digest != load(qwen3_backbone).digest
