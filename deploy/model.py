"""The served heads' files, as every replica reads them for itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.settings import ModelSettings
from tokenalign.backbone import Backbone, BackboneIdentity
from tokenalign.config import ModelConfig
from tokenalign.errors import ConfigError
from tokenalign.foreign import ForeignOverrides
from tokenalign.head import AlignmentHead
from tokenalign.references import resolve_backbone
from tokenalign.text import TextTokenizer
from tokenalign.weights import label_fingerprint, load_head, locate_head, model_fingerprint


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """A head with its configuration and tokenizer; the encoder's weights are loaded by the encoder alone."""

    settings: ModelSettings
    folder: Path
    config: ModelConfig
    head: AlignmentHead
    head_digest: str
    tokenizer: TextTokenizer

    @classmethod
    def load(cls, settings: ModelSettings) -> "ServedModel":
        """The model that `settings` names; raises the library's errors, each naming the file or key at fault."""
        folder = locate_head(
            settings.id_or_path,
            revision=settings.revision,
            cache_dir=settings.cache_dir,
            local_files_only=settings.local_files_only,
        )
        overrides = None  # given ones would have a head of our own read as another program's, under another fingerprint
        if settings.config_overrides or settings.tensor_overrides:
            overrides = ForeignOverrides(config=settings.config_overrides, tensors=settings.tensor_overrides)
        config, head, digest = load_head(folder, overrides=overrides)
        if settings.backbone is not None:
            config = config.with_backbone(settings.backbone)
        return cls(
            settings,
            folder,
            config,
            head,
            digest,
            TextTokenizer.load(_backbone_folder(settings, config, folder), config),
        )

    def load_backbone(self) -> Backbone:
        """The frozen encoder, checked."""
        return Backbone.load(
            self.config,
            base=self.folder,
            device=self.settings.device,
            dtype=self.settings.dtype,
            cache_dir=self.settings.cache_dir,
            local_files_only=self.settings.local_files_only,
        )

    @property
    def logit_scale(self) -> float:
        """What a mean of cosines is multiplied with to be a logit."""
        return self.head.scale.item() / self.config.temperature

    def label_fingerprint(self, backbone: BackboneIdentity) -> str:
        """What names cached label rows of this head on that encoder."""
        return label_fingerprint(self.config, backbone, self.tokenizer.digest, self.head_digest)

    def fingerprint(self, backbone: BackboneIdentity) -> str:
        """What names scores of this head on that encoder."""
        return model_fingerprint(self.label_fingerprint(backbone), self.config)

    def check_same_encoder(self, name: str, other: "ServedModel") -> None:
        """Raise `ConfigError` unless the head `other`, served as `name`, is on the encoder of this one."""
        ours, theirs = self.config.backbone, other.config.backbone
        same_files = ours.sha256 is not None and ours.sha256 == theirs.sha256
        if not same_files:
            folders = [_backbone_folder(m.settings, m.config, m.folder).resolve() for m in (self, other)]
            same_files = folders[0] == folders[1] and ours.revision == theirs.revision
        if not same_files or self.config.backbone_width != other.config.backbone_width:
            raise ConfigError(
                f"model.heads.{name}: is on the encoder {theirs.reference!r}, the default head on {ours.reference!r}; "
                "heads of one application share an encoder, serve this one as an application of its own"
            )


Models = Mapping[str, ServedModel]
"""Heads on one encoder, by the names that requests give; the default one first."""


def served_models(settings: ModelSettings, given: ServedModel | Models | None = None) -> Models:
    """What is given, else what the settings name; the default head goes by the name in its configuration.

    Raises the library's errors, and `ConfigError` for heads on another encoder or two of one name.
    """
    if isinstance(given, ServedModel):
        return {given.config.name: given}
    if given is not None:
        return given
    default = ServedModel.load(settings)
    models = {default.config.name: default}
    for name, head in settings.heads.items():
        if name in models:
            raise ConfigError(f"model.heads.{name}: is the name of the default head too; choose another")
        models[name] = ServedModel.load(settings.model_copy(update=dict(head)))
        default.check_same_encoder(name, models[name])
    return models


def _backbone_folder(settings: ModelSettings, config: ModelConfig, base: Path) -> Path:
    return resolve_backbone(
        config.backbone, base=base, cache_dir=settings.cache_dir, local_files_only=settings.local_files_only
    )
