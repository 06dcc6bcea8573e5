"""The command `calibrate`: a head's config.json in, the same with its calibrations out."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from tokenalign.training.assessment import AssessOptions
from tokenalign.training.calibration import scarcity
from tokenalign.training.command_options import Subparsers, add_shared_options, count, data_dir, quiet_transformers
from tokenalign.training.recalibration import recalibrate


def add_calibrate_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """The parser of `calibrate`; its namespace's `run` fits, writes config.json and gives the exit code."""
    parser = subparsers.add_parser(
        "calibrate",
        help="fit the calibrations of a head that has none",
        description="Fit what makes independent probabilities of a head's logits, and the score below which no label "
        "should be named, on the messages that its temperature was fitted on, and write both into its config.json. "
        "Weights and temperature stay.",
    )
    parser.add_argument("folder", type=Path, help="the head's folder; its config.json is rewritten")
    parser.add_argument("--data", type=Path, metavar="FILE", help="the file that the head was trained on, if your own")
    parser.add_argument("--test-data", type=Path, metavar="FILE", help="the test file that it was trained with")
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
                data=options.data,
                test_data=options.test_data,
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
    if (limit := config.abstention) is not None:
        lines.append(f"min_score that {limit.kept:.0%} of messages reach, {limit.labels} labels: {limit.min_score:.4f}")
    for name, figures in config.provenance["training"]["multi_label"].items():
        pairs = figures["examples"] * figures["classes"]
        lines.append(f"{name}: {pairs:,} pairs, NLL {figures['pair_nll']:.4f}, ECE {figures['pair_ece']:.4f}")
    else:
        lines.append("no min_score: too few messages to fit one on")
    if (warning := scarcity(config.provenance["training"])) is not None:
        lines.append(f"warning: {warning}")
    Console(file=sys.stdout, highlight=False, soft_wrap=True).print("\n".join(lines))
    return 0
