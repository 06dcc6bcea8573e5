"""Parameters and bytes of a model, out of its configuration alone: no weight is made or read."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from tokenalign.compression.file_size import safetensors_bytes
from tokenalign.compression.recurrent import is_recurrent_scalar


@dataclass(frozen=True, slots=True)
class Counts:
    """What a headless text model consists of.

    layer_types: of each layer, or None where the architecture has one type
    rows: of the embedding table; recurrent_scalars: what distillation leaves as it is
    file_bytes: of one safetensors file with all weights
    """

    layers: int
    layer_types: tuple[str, ...] | None
    rows: int
    parameters: int
    embedding_parameters: int
    recurrent_scalars: int
    file_bytes: int

    @property
    def stack_parameters(self) -> int:
        """Parameters of everything but the embedding table."""
        return self.parameters - self.embedding_parameters

    @property
    def embedding_share(self) -> float:
        """Of the embedding table among all parameters, 0 to 1."""
        return self.embedding_parameters / self.parameters

    def record(self) -> dict[str, Any]:
        """The counts as a manifest holds them."""
        derived = {"stack_parameters": self.stack_parameters, "embedding_share": round(self.embedding_share, 6)}
        return asdict(self) | derived


def meta_model(config: Any) -> Any:
    """The headless model of a transformers configuration on the meta device: shapes without values."""
    from transformers import AutoModel

    with torch.device("meta"):
        return AutoModel.from_config(config)  # type: ignore[no-untyped-call]  # transformers leaves it untyped


def count(config: Any, dtype: torch.dtype = torch.bfloat16) -> Counts:
    """The counts of a transformers configuration, its file in `dtype`."""
    return count_model(meta_model(config), dtype)


def count_model(model: Any, dtype: torch.dtype = torch.bfloat16) -> Counts:
    """The counts of a headless transformers model."""
    embedding = model.get_input_embeddings().weight
    types = getattr(model.config, "layer_types", None)
    return Counts(
        layers=int(model.config.num_hidden_layers),
        layer_types=None if types is None else tuple(types),
        rows=int(embedding.shape[0]),
        parameters=sum(p.numel() for p in model.parameters()),
        embedding_parameters=embedding.numel(),
        recurrent_scalars=sum(p.numel() for name, p in model.named_parameters() if is_recurrent_scalar(name)),
        file_bytes=safetensors_bytes({name: t.shape for name, t in model.state_dict().items()}, dtype),
    )
