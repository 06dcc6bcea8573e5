"""The command `calibrate`: a head's config.json in, the same with its calibrations out."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from tokenalign.training.assessment import AssessOptions
from tokenalign.training.command_options import Subparsers, add_shared_options, count, data_dir, quiet_transformers
from tokenalign.training.recalibration import recalibrate


def add_calibrate_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """The parser of `calibrate`; its namespace's `run` fits, writes config.json and gives the exit code."""
    parser = subparsers.add_parser(
        "calibrate",
        help="fit independent scores (multi_label) of a head that has none",
        description="Fit what makes independent probabilities of a head's logits, on the messages that its temperature "
        "was fitted on, and write it into its config.json. Weights and temperature stay.",
    )
    parser.add_argument("folder", type=Path, help="the head's folder; its config.json is rewritten")
    parser.add_argument("--seed", type=count, help="the split of a head that doesn't say its own")
    add_shared_options(parser)
    parser.set_defaults(run=run_calibrate)
    return parser


def run_calibrate(options: argparse.Namespace) -> int:
    """0 after config.json was written; errors are `TokenAlignError`s."""
    quiet_transformers()
    with Console(stderr=True, highlight=False).status("…") as status:
        config = recalibrate(
            options.folder,
            AssessOptions(
                model=None,
                data_dir=data_dir(options),
                seed=options.seed,
                backbone=options.backbone,
                device=options.device,
                dtype=options.dtype,
                cache_dir=options.cache_dir,
                local_only=options.local_only,
            ),
            on_step=lambda what: status.update(f"{what} …"),
        )
    fitted = config.multi_label
    assert fitted is not None, "recalibrate gives a calibration"  # noqa: S101  or raises
    lines = [f"{options.folder}: multi_label scale {fitted.scale:.4f}, bias {fitted.bias:.4f}"]
    for name, figures in config.provenance["training"]["multi_label"].items():
        pairs = figures["examples"] * figures["classes"]
        lines.append(f"{name}: {pairs:,} pairs, NLL {figures['pair_nll']:.4f}, ECE {figures['pair_ece']:.4f}")
    Console(file=sys.stdout, highlight=False, soft_wrap=True).print("\n".join(lines))
    return 0
