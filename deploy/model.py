"""The served head's files, as every replica reads them for itself."""

from dataclasses import dataclass
from pathlib import Path

from deploy.settings import ModelSettings
from tokenalign.backbone import Backbone, BackboneIdentity
from tokenalign.config import ModelConfig
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
        backbone_folder = resolve_backbone(
            config.backbone,
            base=folder,
            cache_dir=settings.cache_dir,
            local_files_only=settings.local_files_only,
        )
        return cls(settings, folder, config, head, digest, TextTokenizer.load(backbone_folder, config))

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
