"""The embedding table with the rows of the kept tokens alone."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch

from tokenalign.compression.model_folder import TextModel, model_of
from tokenalign.compression.vocabulary_rule import Kept
from tokenalign.errors import CompressionError

_ID_SUFFIX = "_token_id"


def keep_rows(source: TextModel, kept: Kept) -> TextModel:
    """The model whose row of each new id is, bit for bit, the source's of the token's old id; all else is the same.

    Raises `CompressionError` where tokenizer and model don't belong together, or the model needs a token that goes.
    """
    model = source.model
    table = model.get_input_embeddings().weight
    if kept.source_ids[-1] >= len(table):
        raise CompressionError(
            f"the tokenizer has token id {kept.source_ids[-1]}, the model {len(table):,} rows; they don't belong "
            "together"
        )
    names = [name for name, parameter in model.named_parameters() if parameter is table]
    state = dict(model.state_dict())
    for name in names:
        state[name] = table.detach()[torch.tensor(kept.source_ids)]
    return TextModel(model_of(_kept_config(model.config, kept), state), source.absent)


def _kept_config(config: Any, kept: Kept) -> Any:
    """The configuration for the kept rows; ids of control tokens are the new ones."""
    smaller = deepcopy(config)
    smaller.vocab_size = len(kept.source_ids)
    new_ids = kept.new_ids
    for name, value in config.to_dict().items():
        if not name.endswith(_ID_SUFFIX) or value is None:
            continue
        ids: Sequence[int] = value if isinstance(value, list) else [value]
        if lost := [i for i in ids if i not in new_ids]:
            raise CompressionError(
                f"config.json names token {lost[0]} as {name}, which does not stay; raise --top, or correct {name}"
            )
        setattr(smaller, name, [new_ids[i] for i in ids] if isinstance(value, list) else new_ids[value])
    return smaller
