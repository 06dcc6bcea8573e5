"""A byte-level BPE tokenizer with fewer tokens: the same rules, the merges that can still be made, ids without gaps."""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tokenalign.compression.bpe import ByteLevelBpe
from tokenalign.compression.vocabulary_rule import Kept
from tokenalign.errors import CompressionError
from tokenalign.text import TOKENIZER_FILE

CONFIG_FILE = "tokenizer_config.json"


def cut_tokenizer(tokenizer: ByteLevelBpe, kept: Kept) -> dict[str, Any]:
    """The tokenizer.json of the kept tokens; `CompressionError` where its steps name tokens in a way unknown here."""
    new_ids = kept.new_ids
    document = deepcopy(tokenizer.document)
    model = document["model"]
    vocabulary = {token: new_ids[i] for token, i in tokenizer.vocabulary.items() if i in new_ids}
    model["vocab"] = dict(sorted(vocabulary.items(), key=lambda item: item[1]))
    model["merges"] = [
        [left, right]
        for left, right in tokenizer.merges
        if left in vocabulary and right in vocabulary and left + right in vocabulary
    ]
    for token in document["added_tokens"]:
        token["id"] = new_ids[token["id"]]
    document["truncation"] = None
    document["padding"] = None
    _renumber(document.get("post_processor"), new_ids)
    _check(document, tokenizer, new_ids)
    return document


def write_tokenizer(source: Path, folder: Path, document: dict[str, Any], kept: Kept) -> None:
    """Write the cut tokenizer.json, and the source's other files that say how it is used, their ids renumbered.

    vocab.json, merges.txt and the like aren't written: they would be a second, older truth.
    """
    _write(folder / TOKENIZER_FILE, document)
    if (source / CONFIG_FILE).is_file():
        config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
        decoder = config.get("added_tokens_decoder")
        if decoder is not None:
            new_ids = kept.new_ids
            config["added_tokens_decoder"] = {str(new_ids[int(i)]): token for i, token in decoder.items()}
        _write(folder / CONFIG_FILE, config)
    for name in ("special_tokens_map.json", "chat_template.jinja"):
        if (source / name).is_file():
            (folder / name).write_bytes((source / name).read_bytes())


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _renumber(processor: dict[str, Any] | None, new_ids: Mapping[int, int]) -> None:
    """Put new ids into a post-processor, in place."""
    kind = None if processor is None else processor["type"]
    if processor is None or kind == "ByteLevel":
        return
    if kind == "Sequence":
        for inner in processor["processors"]:
            _renumber(inner, new_ids)
    elif kind == "TemplateProcessing":
        for token in processor["special_tokens"].values():
            token["ids"] = [new_ids[i] for i in token["ids"]]
    elif kind in ("RobertaProcessing", "BertProcessing"):
        for name in ("sep", "cls"):
            processor[name] = [processor[name][0], new_ids[processor[name][1]]]
    else:
        raise CompressionError(
            f"the post-processor {kind} of {TOKENIZER_FILE} may name token ids; it is not known here"
        )


def _check(document: dict[str, Any], source: ByteLevelBpe, new_ids: Mapping[int, int]) -> None:
    """Raise `CompressionError` unless the tokenizers library gives every kept token the id that its row has."""
    cut = Tokenizer.from_str(json.dumps(document))
    for token, i in source.ids.items():
        if cut.token_to_id(token) != new_ids.get(i):
            raise CompressionError(
                f"token {token!r} has id {cut.token_to_id(token)} in the cut tokenizer, its row would be "
                f"{new_ids.get(i)}; the source numbers its tokens in a way that this step does not know"
            )
