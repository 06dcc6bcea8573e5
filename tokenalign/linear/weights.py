"""Linear heads on disk: config.json and model.safetensors, and the fingerprint of what answers depend on."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenalign.backbone import BackboneIdentity
from tokenalign.config import CONFIG_FILE, TEXT_RULES_VERSION, UNICODE_VERSION, fingerprint_of
from tokenalign.errors import CheckpointError
from tokenalign.linear.config import LinearConfig
from tokenalign.linear.head import LinearHead
from tokenalign.references import WEIGHTS_FILE, check_sha256


def save_linear(folder: Path, config: LinearConfig, head: LinearHead) -> None:
    """Write config.json and model.safetensors that `load_linear` reads back equal.

    Raises `CheckpointError`, and writes nothing, for a head that `load_linear` would refuse.
    """
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}
    if problems := _differences(config, state):
        raise CheckpointError(f"this head can't be saved with this configuration: {'; '.join(problems)}")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config.save(folder / CONFIG_FILE)


def load_linear(folder: Path) -> tuple[LinearConfig, LinearHead, str]:
    """(configuration, head in fp32 on the CPU, sha256 of its weights file) of the head in `folder`.

    Raises `ConfigError` or `CheckpointError` saying which key or tensor doesn't fit.
    """
    config = LinearConfig.load(folder / CONFIG_FILE)
    path = folder / WEIGHTS_FILE
    digest = check_sha256(path, None)
    try:
        state = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {error}; fetch it again") from error
    if problems := _differences(config, state):
        raise CheckpointError(f"{path} doesn't fit its {CONFIG_FILE}: {'; '.join(problems)}")
    head = LinearHead(config.backbone_width, len(config.labels))
    head.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return config, head.eval(), digest


def linear_fingerprint(config: LinearConfig, backbone: BackboneIdentity, tokenizer_digest: str, digest: str) -> str:
    """The hex sha256 over everything that an answer depends on; digest: of the head's weights."""
    values = config.model_dump(mode="json", exclude={"name", "backbone", "provenance"})
    return fingerprint_of(
        {
            "config": values,
            "text_rules": TEXT_RULES_VERSION,
            "unicode": UNICODE_VERSION,
            "backbone": asdict(backbone),
            "tokenizer": tokenizer_digest,
            "head": digest,
        }
    )


def _differences(config: LinearConfig, got: Mapping[str, Tensor]) -> list[str]:
    labels = len(config.labels)
    expected = {"score.weight": (labels, config.backbone_width), "score.bias": (labels,)}
    problems = [f"{name} is missing" for name in sorted(expected.keys() - got.keys())]
    problems += [f"{name} is unknown" for name in sorted(got.keys() - expected.keys())]
    for name in sorted(expected.keys() & got.keys()):
        if tuple(got[name].shape) != expected[name]:
            problems.append(f"{name} has shape {tuple(got[name].shape)}, {expected[name]} is needed")
        elif not got[name].is_floating_point() or not got[name].float().isfinite().all():
            problems.append(f"{name} must hold finite floating-point numbers")
    return problems
