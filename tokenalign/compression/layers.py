"""Fewer layers: chosen ones are kept with their weights, in order, and the rest is left out."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from torch import nn

from tokenalign.compression.model_folder import TextModel, model_of
from tokenalign.errors import CompressionError

# The cards' maps: which layers of the model with so many are kept.
CARD_LAYERS = {24: (0, 4, 6, 11, 13, 16, 20, 23), 8: (0, 1, 3, 4, 6, 7), 6: (0, 2, 3, 5)}

# Lists in a configuration that hold a value for each layer. Other ones that look like it are refused.
_PER_LAYER = ("layer_types", "mlp_layer_types")


def check_layers(kept: Sequence[int], layers: int) -> tuple[int, ...]:
    """The kept layers as a tuple; `CompressionError` unless they rise, and lie within a model of `layers` layers."""
    chosen = tuple(kept)
    if not chosen or list(chosen) != sorted(set(chosen)) or chosen[0] < 0 or chosen[-1] >= layers:
        raise CompressionError(
            f"--layers {','.join(map(str, chosen))}: must be different numbers in rising order, from 0 to "
            f"{layers - 1}, since the model has {layers} layers"
        )
    return chosen


def kept_config(config: Any, kept: Sequence[int]) -> Any:
    """A copy of a transformers configuration with the kept layers alone.

    Raises `CompressionError` for one with settings by layer number other than the lists that transformers shares.
    """
    layers = int(config.num_hidden_layers)
    chosen = check_layers(kept, layers)
    values = config.to_dict()
    strange = sorted(
        name
        for name, value in values.items()
        if isinstance(value, list) and len(value) == layers and "layer" in name and name not in _PER_LAYER
    )
    if strange:
        raise CompressionError(
            f"{config.model_type} has {', '.join(strange)} for each layer, which this step does not know; it knows "
            f"{' and '.join(_PER_LAYER)}"
        )
    smaller = deepcopy(config)
    smaller.num_hidden_layers = len(chosen)
    for name in _PER_LAYER:
        if values.get(name) is not None:
            setattr(smaller, name, [values[name][i] for i in chosen])
    return smaller


def layer_list(model: nn.Module, layers: int) -> str:
    """The name of the one module list that holds the model's layers; `CompressionError` where there is none."""
    names: list[str] = [
        name for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and len(part) == layers
    ]
    if not names:
        raise CompressionError(
            f"{type(model).__name__} has no list of its {layers} layers (they may share weights), so none can "
            "be left out"
        )
    return min(names, key=_depth)


def _depth(name: str) -> int:
    return name.count(".")


def keep_layers(source: TextModel, kept: Sequence[int]) -> TextModel:
    """A model of the kept layers, in order; every weight is the source's own, bit for bit.

    Raises `CompressionError` for layers that the source hasn't, and for architectures without a list of alike layers.
    """
    model = source.model
    config = kept_config(model.config, kept)
    prefix = f"{layer_list(model, int(model.config.num_hidden_layers))}."
    places = {str(layer): str(place) for place, layer in enumerate(kept)}
    state = {}
    for name, tensor in model.state_dict().items():
        if not name.startswith(prefix):
            state[name] = tensor
            continue
        layer, _, rest = name.removeprefix(prefix).partition(".")
        if layer in places:
            state[f"{prefix}{places[layer]}.{rest}"] = tensor
    return TextModel(model_of(config, state), source.absent)
