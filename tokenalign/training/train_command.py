"""The command `train`: options in, heads in folders out, progress on the terminal."""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tokenalign.config import CONFIG_FILE
from tokenalign.errors import InputError
from tokenalign.training import trainer
from tokenalign.training.calibration import scarcity
from tokenalign.training.checkpoint import CHECKPOINT_FILE
from tokenalign.training.command_options import (
    Subparsers,
    add_shared_options,
    cache_home,
    count,
    data_dir,
    quiet_transformers,
)
from tokenalign.training.encoder import backbone_reference
from tokenalign.training.linear_command import add_linear_options, refuse_linear_options, run_train_linear
from tokenalign.training.own_data import OwnFiles
from tokenalign.training.own_run import LABELS_FILE, OWN_RECIPE, own_recipe
from tokenalign.training.recipes import RECIPES, Recipe, recipe_named
from tokenalign.training.run import RunOptions, check_output, run_training
from tokenalign.training.splits import Split

FEW_LABELS = 5  # to validate on; below it the train command says so

OWN_OPTIONS = (
    *("test-data", "labels-file", "text-column", "label-column", "split", "name", "label-template"),
    *("max-epochs", "patience", "learning-rate", "batch-size"),
)


def _add_own(parser: argparse.ArgumentParser) -> None:
    """The options of training on a user's own data; None where not given."""
    own = parser.add_argument_group("your own data (--data)")
    own.add_argument("--test-data", type=Path, metavar="FILE", help="messages to test on (default: some of --data's)")
    own.add_argument(
        "--labels-file",
        type=Path,
        metavar="FILE",
        help='descriptions: a line for each label, {"name": "…", "description": "…" or ["…", …]} '
        "(default: a label's name describes it)",
    )
    own.add_argument("--text-column", metavar="NAME", help="default: text")
    own.add_argument("--label-column", metavar="NAME", help="default: label")
    own.add_argument(
        "--split",
        choices=["labels", "messages"],
        help="labels: validate and test on labels that are not trained on, as they will be in use; "
        "messages: every label trains, validates and is tested, on different messages (default: labels)",
    )
    own.add_argument("--name", help="of the head (default: the data file's name)")
    own.add_argument("--label-template", help="words around each label, holding {label}; never scored")
    own.add_argument("--max-epochs", type=int, help=f"default: {OWN_RECIPE.max_epochs}")
    own.add_argument(
        "--patience",
        type=int,
        help=f"epochs to end after in which validation NLL falls by less than {OWN_RECIPE.min_improvement:g} "
        f"(default: {OWN_RECIPE.patience})",
    )
    own.add_argument("--learning-rate", type=float, help=f"default: {OWN_RECIPE.learning_rate:g}")
    own.add_argument("--batch-size", type=int, help=f"default: {OWN_RECIPE.batch_size}")


def add_train_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """The parser of `train`; its namespace's `run` trains and gives the exit code."""
    parser = subparsers.add_parser(
        "train",
        help="train a head on a frozen backbone",
        description="Train a head on a frozen backbone. Data that is missing is downloaded by pinned revision.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--recipe", choices=sorted(RECIPES), help="a built-in way to train, on public data")
    what.add_argument(
        "--data", type=Path, metavar="FILE", help="train on these messages: JSON Lines, CSV, TSV or Parquet"
    )
    parser.add_argument(
        "--head",
        choices=["alignment", "linear"],
        default="alignment",
        help="alignment: labels are described in each request; linear: those of the data (default: alignment)",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the head; a fresh one")
    parser.add_argument(
        "--seed",
        type=count,
        nargs="+",
        default=[42],
        help="of split, start and batches (default: 42); of several, each trains a head in a folder of its own",
    )
    _add_own(parser)
    add_linear_options(parser)
    parser.add_argument("--feature-dir", type=Path, help="where token states are kept (default: ~/.cache/tokenalign)")
    parser.add_argument("--backbone-revision", help="the hub commit of the backbone, 40 hex digits")
    parser.add_argument("--resume", action="store_true", help="go on with the interrupted run in --output")
    add_shared_options(parser)
    parser.set_defaults(run=run_train)
    return parser


def run_train(options: argparse.Namespace) -> int:
    """0 after every seed's head was trained and saved; errors are `TokenAlignError`s."""
    if options.head == "linear":
        return run_train_linear(options)
    refuse_linear_options(options)
    recipe, own = recipe_and_data(options)
    seeds = list(dict.fromkeys(options.seed))
    folder: Path = options.output
    folders = {seed: folder / f"seed-{seed}" for seed in seeds} if len(seeds) > 1 else {seeds[0]: folder}
    if not options.resume:
        check_output(folder, resume=False)
    quiet_transformers()
    for seed, head in folders.items():
        begun = (head / CHECKPOINT_FILE).exists()
        if len(seeds) > 1 and (head / CONFIG_FILE).exists() and not begun:
            continue  # done before the interruption
        _train_one(options, recipe, own, seed, head, resume=options.resume and (begun or len(seeds) == 1))
    return 0


def recipe_and_data(options: argparse.Namespace) -> tuple[Recipe, OwnFiles | None]:
    """The recipe of a command line, and the user's files where it trains on them.

    Raises `InputError` for an option that has no meaning beside --recipe.
    """
    if options.data is None:
        for name in OWN_OPTIONS:
            if getattr(options, name.replace("-", "_")) is not None:
                raise InputError("goes with --data; the built-in recipes have their own", (name,))
        return recipe_named(options.recipe), None
    recipe = own_recipe(
        options.name or options.data.stem,
        label_template=options.label_template,
        max_epochs=options.max_epochs,
        patience=options.patience,
        learning_rate=options.learning_rate,
        batch_size=options.batch_size,
    )
    own = OwnFiles(
        data=options.data,
        test=options.test_data,
        labels=options.labels_file,
        text_column=options.text_column or "text",
        label_column=options.label_column or "label",
        split=options.split or "labels",
    )
    return recipe, own


def _train_one(
    options: argparse.Namespace, recipe: Recipe, own: OwnFiles | None, seed: int, folder: Path, *, resume: bool
) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with _TrainingBar(console) as bar:
        config = run_training(
            RunOptions(
                recipe=recipe,
                own=own,
                output=folder,
                data_dir=data_dir(options),
                feature_dir=options.feature_dir or cache_home() / "features",
                seed=seed,
                backbone=backbone_reference(options.backbone, options.backbone_revision),
                device=options.device,
                dtype=options.dtype,
                cache_dir=options.cache_dir,
                local_only=options.local_only,
                resume=resume,
            ),
            on_split=lambda split, full: console.print("\n".join(split_lines(split, full)), markup=False),
            on_features=bar.features,
            on_progress=bar.batch,
            on_epoch=bar.epoch,
        )
    figures = config.provenance["training"]
    validation = figures["validation_calibrate"]
    lines = [
        f"{folder}: epoch {figures['best_epoch']} of {figures['epochs']}, "
        f"temperature {config.temperature:.4f}; validation accuracy {validation['accuracy']:.3f}, "
        f"NLL {validation['nll']:.3f}, ECE {validation['ece']:.3f}"
    ]
    if figures["best_epoch"] == 0:
        lines.append(
            "warning: no epoch had a lower validation NLL than the start, so the head is as it began; more messages or "
            "labels, or a lower --learning-rate, may help"
        )
    if (warning := scarcity(figures)) is not None:
        lines.append(f"warning: {warning}")
    if own is not None:
        lines += [
            f"measure it:  tokenalign evaluate --model {folder} --data {own.data}",
            f"use it:      tokenalign --model {folder} --labels-file {folder / LABELS_FILE} --text '…'",
        ]
    Console(file=sys.stdout, highlight=False, soft_wrap=True).print("\n".join(lines), markup=False)


def split_lines(split: Split, full: int) -> list[str]:
    """What is told of a split before training: its sizes, what was left out of it as duplicates, and long messages.

    full: training and validation messages that take all tokens that the head reads
    """
    sizes = ", ".join(f"{name} {len(examples):,}" for name, examples in split.partitions.items())
    counts = [len(labels) for labels in (split.train_labels, split.validation_labels, split.test_labels)]
    labels = (
        "{} labels train, {} validate, {} test".format(*counts)
        if split.kind == "labels"
        else f"all {counts[0]} labels train, validate and test"
    )
    lines = [f"split of seed {split.seed}: {labels}; messages: {sizes}"]
    removed = {name: found for name, found in split.removed.items() if found.total}
    for name, found in removed.items():
        line = f"duplicates left out of {name}: {found.exact} equal, {found.normalised} but for case or white space"
        lines.append(line + (f"; {found.other_label} have another label than the first" if found.other_label else ""))
    if split.kind == "labels" and counts[1] < FEW_LABELS:
        lines.append(
            f"warning: the best epoch and the calibrations rest on {counts[1]} validation labels, which is few; where "
            "the head is only ever asked about these labels, train with --split messages"
        )
    if not removed:
        lines.append("no duplicates, within or across partitions")
    if full:
        lines.append(f"{full:,} messages fill all tokens that the head reads; what lies behind those is not seen")
    return lines


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
