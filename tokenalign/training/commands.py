"""The commands `train`, `evaluate` and `calibrate`: options in, a folder or a report out, progress on the terminal."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tokenalign.backbone import DTYPES
from tokenalign.errors import InputError
from tokenalign.training import trainer
from tokenalign.training.assessment import ERASURE_TEXTS, SPLITS, AssessOptions, assess
from tokenalign.training.encoder import backbone_reference
from tokenalign.training.recalibration import recalibrate
from tokenalign.training.recipes import RECIPES, recipe_named
from tokenalign.training.run import RunOptions, run_training
from tokenalign.weights import DEFAULT_MODEL

COLUMNS = {"accuracy": "accuracy", "macro_f1": "macro F1", "nll": "NLL", "brier": "Brier", "ece": "ECE"}
WEAKEST_CLASSES = 10


class Subparsers(Protocol):
    """What argparse's `add_subparsers` gives, which has no public name."""

    def add_parser(self, name: str, *, help: str, description: str) -> argparse.ArgumentParser:
        """A new command's parser."""
        ...


def add_train_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """The parser of `train`; its namespace's `run` trains and gives the exit code."""
    parser = subparsers.add_parser(
        "train",
        help="train a head on a frozen backbone",
        description="Train a head on a frozen backbone. Data that is missing is downloaded by pinned revision.",
    )
    parser.add_argument("--recipe", choices=sorted(RECIPES), required=True, help="how to train")
    parser.add_argument("--output", type=Path, required=True, help="folder for the head; a fresh one")
    parser.add_argument("--seed", type=_count, default=42, help="of split, start and batches (default: 42)")
    parser.add_argument("--feature-dir", type=Path, help="where token states are kept (default: ~/.cache/tokenalign)")
    parser.add_argument("--backbone-revision", help="the hub commit of the backbone, 40 hex digits")
    parser.add_argument("--resume", action="store_true", help="go on with the interrupted run in --output")
    _add_shared(parser)
    parser.set_defaults(run=run_train)
    return parser


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
    parser.add_argument("--seed", type=_count, help="the split of a head that doesn't say its own")
    parser.add_argument("--per-class", action="store_true", help="show every class, not the weakest ones")
    parser.add_argument(
        "--erasure-texts",
        type=_count,
        default=ERASURE_TEXTS,
        help=f"texts to delete matched words from; 0: none (default: {ERASURE_TEXTS})",
    )
    _add_shared(parser)
    parser.set_defaults(run=run_evaluate)
    return parser


def add_calibrate_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """The parser of `calibrate`; its namespace's `run` fits, writes config.json and gives the exit code."""
    parser = subparsers.add_parser(
        "calibrate",
        help="fit independent scores (multi_label) of a head that has none",
        description="Fit what makes independent probabilities of a head's logits, on the messages that its temperature "
        "was fitted on, and write it into its config.json. Weights and temperature stay.",
    )
    parser.add_argument("folder", type=Path, help="the head's folder; its config.json is rewritten")
    parser.add_argument("--seed", type=_count, help="the split of a head that doesn't say its own")
    _add_shared(parser)
    parser.set_defaults(run=run_calibrate)
    return parser


def run_calibrate(options: argparse.Namespace) -> int:
    """0 after config.json was written; errors are `TokenAlignError`s."""
    _quiet_transformers()
    with Console(stderr=True, highlight=False).status("…") as status:
        config = recalibrate(
            options.folder,
            AssessOptions(
                model=None,
                data_dir=_data_dir(options),
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


def run_train(options: argparse.Namespace) -> int:
    """0 after a head was trained and saved; errors are `TokenAlignError`s."""
    _quiet_transformers()
    console = Console(stderr=True, highlight=False)
    with _TrainingBar(console) as bar:
        config = run_training(
            RunOptions(
                recipe=recipe_named(options.recipe),
                output=options.output,
                data_dir=_data_dir(options),
                feature_dir=options.feature_dir or _home() / "features",
                seed=options.seed,
                backbone=backbone_reference(options.backbone, options.backbone_revision),
                device=options.device,
                dtype=options.dtype,
                cache_dir=options.cache_dir,
                local_only=options.local_only,
                resume=options.resume,
            ),
            on_features=bar.features,
            on_progress=bar.batch,
            on_epoch=bar.epoch,
        )
    figures = config.provenance["training"]
    validation = figures["validation_calibrate"]
    Console(file=sys.stdout, highlight=False, soft_wrap=True).print(
        f"{options.output}: epoch {figures['best_epoch']} of {figures['epochs']}, "
        f"temperature {config.temperature:.4f}; validation accuracy {validation['accuracy']:.3f}, "
        f"NLL {validation['nll']:.3f}, ECE {validation['ece']:.3f}"
    )
    return 0


def run_evaluate(options: argparse.Namespace) -> int:
    """0 after the report was printed and, if asked for, saved; errors are `TokenAlignError`s."""
    _quiet_transformers()
    output: Path | None = options.output
    if output is not None and not output.parent.is_dir():
        raise InputError(f"folder {output.parent} does not exist; make it, or save the report elsewhere", ("output",))
    console = Console(stderr=True, highlight=False)
    with console.status("…") as status:
        report = assess(
            AssessOptions(
                model=options.model,
                data_dir=_data_dir(options),
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


class _TrainingBar:
    """A progress bar for encoding and for epochs; every epoch leaves a line above it."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "_TrainingBar":
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def features(self, what: str, done: int, total: int) -> None:
        self._update(f"encoding {what}", done, total, "")

    def batch(self, progress: trainer.Progress) -> None:
        note = f"epoch {progress.epoch}, loss {progress.loss:.3f}, best NLL {progress.best_nll:.3f}"
        self._update("training", progress.batch, progress.batches, note)

    def epoch(self, report: trainer.EpochReport) -> None:
        loss = "" if report.loss is None else f"loss {report.loss:.4f}, "
        self._progress.console.print(
            f"epoch {report.epoch}: {loss}validation NLL {report.validation_nll:.4f}, "
            f"accuracy {report.validation_accuracy:.4f}, scale {report.scale:.2f}",
            soft_wrap=True,
        )

    def _update(self, what: str, done: int, total: int, note: str) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, note="")
        self._progress.update(self._tasks[what], completed=done, total=total, note=note)


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


def _add_shared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data-dir", type=Path, help="folder with banking77/ and clinc150/ (default: ~/.cache/tokenalign)"
    )
    parser.add_argument(
        "--backbone", help="the encoder: a folder, hub id or package:NAME (default: MiniLM, or the head's)"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: auto)")
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPES], help="of the encoder (default: auto)")
    parser.add_argument("--cache-dir", metavar="FOLDER", help="Hugging Face cache folder")
    parser.add_argument("--local-only", action="store_true", help="download nothing")


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, not {value}")
    return value


def _home() -> Path:
    return Path.home() / ".cache" / "tokenalign"


def _data_dir(options: argparse.Namespace) -> Path:
    folder: Path = options.data_dir or _home() / "data"
    return folder


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves them untyped
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
