"""The command `evaluate`: options in, a report out."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tokenalign.errors import InputError
from tokenalign.training.assessment import ERASURE_TEXTS, SPLITS, AssessOptions, assess
from tokenalign.training.command_options import Subparsers, add_shared_options, count, data_dir, quiet_transformers
from tokenalign.weights import DEFAULT_MODEL

COLUMNS = {"accuracy": "accuracy", "macro_f1": "macro F1", "nll": "NLL", "brier": "Brier", "ece": "ECE"}
WEAKEST_CLASSES = 10


def add_evaluate_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """The parser of `evaluate`; its namespace's `run` measures and gives the exit code."""
    parser = subparsers.add_parser(
        "evaluate",
        help="measure a head on a test split, beside the cosine baseline",
        description="Measure a head beside the cosine of its encoder's mean-pooled vectors.",
    )
    parser.add_argument("--model", help=f"a head's folder, hub id or shipped name (default: {DEFAULT_MODEL})")
    parser.add_argument(
        "--split",
        nargs="+",
        choices=list(SPLITS),
        default=["unseen", "all"],
        help="; ".join(f"{name}: {what}" for name, what in SPLITS.items()) + " (default: unseen all)",
    )
    parser.add_argument("--output", type=Path, help="save the whole report as JSON to this file")
    parser.add_argument("--seed", type=count, help="the split of a head that doesn't say its own")
    parser.add_argument("--per-class", action="store_true", help="show every class, not the weakest ones")
    parser.add_argument(
        "--erasure-texts",
        type=count,
        default=ERASURE_TEXTS,
        help=f"texts to delete matched words from; 0: none (default: {ERASURE_TEXTS})",
    )
    add_shared_options(parser)
    parser.set_defaults(run=run_evaluate)
    return parser


def run_evaluate(options: argparse.Namespace) -> int:
    """0 after the report was printed and, if asked for, saved; errors are `TokenAlignError`s."""
    quiet_transformers()
    output: Path | None = options.output
    if output is not None and not output.parent.is_dir():
        raise InputError(f"folder {output.parent} does not exist; make it, or save the report elsewhere", ("output",))
    console = Console(stderr=True, highlight=False)
    with console.status("…") as status:
        report = assess(
            AssessOptions(
                model=options.model,
                data_dir=data_dir(options),
                splits=tuple(options.split),
                seed=options.seed,
                erasure_texts=options.erasure_texts,
                backbone=options.backbone,
                device=options.device,
                dtype=options.dtype,
                cache_dir=options.cache_dir,
                local_only=options.local_only,
            ),
            on_step=lambda what: status.update(f"{what} …"),
        )
    if output is not None:
        output.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    out = Console(file=sys.stdout, highlight=False)
    for name, result in report["results"].items():
        print_result(out, name, result, every_class=options.per_class)
    return 0


def print_result(console: Console, name: str, result: dict[str, Any], *, every_class: bool) -> None:
    """Print one split's figures: the head beside the baselines, what its matches mean, and its classes."""
    figures = result["model"]
    table = Table(title=f"{name}: {figures['examples']:,} messages, {figures['classes']} labels", title_justify="left")
    table.add_column("")
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right")
    for row, metrics in {"this head": figures, **result["baselines"]}.items():
        table.add_row(row, *(f"{metrics[key]:.3f}" for key in COLUMNS))
    console.print(table)
    console.print(_matches_line(result["matches"]), soft_wrap=True)
    classes = sorted(figures["per_class"], key=lambda score: score["f1"])
    shown = classes if every_class else classes[:WEAKEST_CLASSES]
    details = Table(
        title="every class" if every_class else f"the {len(shown)} weakest classes of {len(classes)}",
        title_justify="left",
    )
    for heading in ("label", "messages", "precision", "recall", "F1"):
        details.add_column(heading, justify="left" if heading == "label" else "right")
    for score in shown:
        details.add_row(
            score["label"], str(score["examples"]), *(f"{score[key]:.3f}" for key in ("precision", "recall", "f1"))
        )
    console.print(details)


def _matches_line(matches: dict[str, Any]) -> str:
    line = f"matches: best minus median similarity {matches['gap']:.3f}"
    if "erasure" not in matches:
        return line
    found = matches["erasure"]
    if found is None:
        return f"{line}; no text had a word beside the matched ones to delete"
    ratio = "infinitely" if found["ratio"] is None else f"{found['ratio']:.1f} times"
    return (
        f"{line}; without the matched words the winning logit falls by {found['matched_drop']:.2f}, without as many "
        f"random words by {found['random_drop']:.2f}: {ratio} as much ({found['texts']} texts)"
    )
