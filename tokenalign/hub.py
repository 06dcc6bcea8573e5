"""A head's way to a model hub: what is written there beside config.json and weights, and how it gets there."""

import tempfile
from pathlib import Path

from tokenalign.config import ModelConfig
from tokenalign.errors import CheckpointError, ConfigError
from tokenalign.head import AlignmentHead
from tokenalign.references import local_backbone
from tokenalign.weights import save_head

CARD_FILE = "README.md"


def model_card(config: ModelConfig, repo_id: str) -> str:
    """A minimal model card: what the head is, what it needs, and how to use it."""
    backbone = config.backbone
    is_package = ":" in backbone.reference
    return "\n".join(
        [
            "---",
            "library_name: tokenalign",
            "pipeline_tag: zero-shot-classification",
            *([] if is_package else [f"base_model: {backbone.reference}"]),
            "---",
            "",
            f"# {config.name}",
            "",
            "A head of tokenalign: it scores a text against label descriptions that come with the request, by late",
            f"interaction on the frozen encoder `{backbone.reference}`. It reads {config.max_length} tokens of a text.",
            "",
            "```python",
            "from tokenalign import TokenAlignClassifier",
            "",
            f'classifier = TokenAlignClassifier.from_pretrained("{repo_id}")',
            'print(classifier("I was charged twice.", ["duplicate card payment", "card not received"]))',
            "```",
            "",
        ]
    )


def push_head(
    config: ModelConfig,
    head: AlignmentHead,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    token: str | bool | None = None,
    endpoint: str | None = None,
) -> str:
    """The URL of the commit that holds the head: config.json, model.safetensors, and a card where there is none yet.

    The repository is made if it must be; so is the branch `revision`. Raises `ConfigError` for a head on an encoder
    that is a folder of this machine, and `CheckpointError` where the hub refuses; a hub that can't be
    reached is the error of huggingface_hub's transport.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if local_backbone(config.backbone.reference) is not None:
        raise ConfigError(
            f"backbone {config.backbone.reference!r} is a folder of this machine, which nobody else has; name a hub id "
            "with its revision, or package:NAME, in the head's config.json, and push it then"
        )
    api = HfApi(endpoint=endpoint, token=token)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            save_head(folder, config, head)
            if not api.file_exists(repo_id, CARD_FILE, revision=revision):
                (folder / CARD_FILE).write_text(model_card(config, repo_id), encoding="utf-8")
            done = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message or f"Upload {config.name}",
            )
    except (HfHubHTTPError, HFValidationError) as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise CheckpointError(
            f"{repo_id!r} can't be pushed to: {said}; check the id, that the token may write there, and the network"
        ) from error
    return str(done.commit_url)
