"""`train --head linear`: options in, linear heads in folders out, figures on the terminal."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tokenalign.errors import InputError
from tokenalign.linear.config import STRIDE, WINDOW, LinearConfig
from tokenalign.training.command_options import cache_home, quiet_transformers
from tokenalign.training.encoder import backbone_reference
from tokenalign.training.labelled_data import LabelledFiles
from tokenalign.training.linear_run import LinearRunOptions, run_linear_training, untrained_labels
from tokenalign.training.linear_trainer import LinearEpoch, LinearRecipe, Pooled
from tokenalign.training.run import check_output
from tokenalign.training.stratified import CALIBRATION, TEST, StratifiedSplit

WEAKEST_CLASSES = 10
LINEAR_OPTIONS = ("labels-column", "window", "stride", "pooling")
ALIGNMENT_OPTIONS = ("recipe", "labels-file", "split", "label-template", "resume")


def add_linear_options(parser: argparse.ArgumentParser) -> None:
    """The options that only a linear head has; None where not given."""
    linear = parser.add_argument_group("a linear head (--head linear, on --data)")
    linear.add_argument(
        "--labels-column",
        metavar="NAME",
        help='of any number of labels a text: a list, or names joined by "|" (default: labels, or --label-column)',
    )
    linear.add_argument("--window", type=int, help=f"tokens that are read at a time (default: {WINDOW})")
    linear.add_argument("--stride", type=int, help=f"tokens from one window to the next (default: {STRIDE})")
    linear.add_argument(
        "--pooling",
        choices=["last", "mean"],
        help="of a window's token states (default: last where a token sees only those before it, else mean)",
    )


def refuse_linear_options(options: argparse.Namespace) -> None:
    """Raise `InputError` for an option of linear heads beside another kind."""
    for name in LINEAR_OPTIONS:
        if getattr(options, name.replace("-", "_")) is not None:
            raise InputError("goes with --head linear", (name,))


def run_train_linear(options: argparse.Namespace) -> int:
    """0 after every seed's head was trained, saved and tested; errors are `TokenAlignError`s."""
    for name in ALIGNMENT_OPTIONS:
        if getattr(options, name.replace("-", "_")) not in (None, False):
            raise InputError(
                "a linear head has no use for it; its labels come from --data, and it trains in seconds", (name,)
            )
    seeds = list(dict.fromkeys(options.seed))
    folder: Path = options.output
    check_output(folder, resume=False)
    quiet_transformers()
    console = Console(file=sys.stdout, highlight=False)
    configs = []
    for seed in seeds:
        head = folder / f"seed-{seed}" if len(seeds) > 1 else folder
        configs.append(_train_one(options, seed, head, console))
    if len(configs) > 1 and configs[0].threshold is not None:
        chosen = ", ".join(f"{config.threshold.threshold:.2f}" for config in configs if config.threshold is not None)
        console.print(f"thresholds of {len(configs)} seeds: {chosen}")
    return 0


def _train_one(options: argparse.Namespace, seed: int, folder: Path, console: Console) -> LinearConfig:
    err = Console(stderr=True, highlight=False, soft_wrap=True)

    def tell_split(split: StratifiedSplit, labels: tuple[str, ...], pooled: Mapping[str, Pooled]) -> None:
        err.print("\n".join(split_lines(split, labels, pooled)), markup=False)

    with _LinearBar(err) as bar:
        config, figures = run_linear_training(
            LinearRunOptions(
                files=LabelledFiles(
                    data=options.data,
                    test=options.test_data,
                    text_column=options.text_column or "text",
                    label_column=options.label_column,
                    labels_column=options.labels_column,
                ),
                output=folder,
                feature_dir=options.feature_dir or cache_home() / "features",
                name=options.name or options.data.stem,
                recipe=recipe_of(options),
                seed=seed,
                window=options.window if options.window is not None else WINDOW,
                stride=options.stride if options.stride is not None else STRIDE,
                pooling=options.pooling,
                backbone=backbone_reference(options.backbone, options.backbone_revision),
                device=options.device,
                dtype=options.dtype,
                cache_dir=options.cache_dir,
                local_only=options.local_only,
            ),
            on_split=tell_split,
            on_vectors=bar.vectors,
            on_epoch=bar.epoch,
        )
    training = config.provenance["training"]
    console.print(f"{folder}: epoch {training['best_epoch']} of {training['epochs']}", soft_wrap=True, markup=False)
    print_linear_figures(console, TEST, config, figures)
    console.print(f"use it:  tokenalign --model {folder} --text '…'", soft_wrap=True, markup=False)
    return config


def recipe_of(options: argparse.Namespace) -> LinearRecipe:
    """The recipe of a command line; `InputError` for a value that isn't more than 0."""
    given = {
        name: getattr(options, name)
        for name in ("learning_rate", "batch_size", "max_epochs", "patience")
        if getattr(options, name) is not None
    }
    for name, value in given.items():
        if not value > 0:
            raise InputError(f"is {value}; it must be more than 0", (name.replace("_", "-"),))
    return LinearRecipe(**given)


def split_lines(split: StratifiedSplit, labels: tuple[str, ...], pooled: Mapping[str, Pooled]) -> list[str]:
    """What is told of a split before training: sizes, windows, duplicates, and labels that can't be judged."""
    sizes = ", ".join(f"{name} {len(part):,}" for name, part in split.partitions.items())
    windows = sum(len(part.vectors) for part in pooled.values())
    lines = [f"split of seed {split.seed}: {len(labels)} labels; texts: {sizes}; {windows:,} windows in all"]
    for name, found in split.removed.items():
        if found.total:
            line = f"duplicates left out of {name}: {found.exact} equal, {found.normalised} but for case or white space"
            lines.append(
                line + (f"; {found.other_label} have other labels than the first" if found.other_label else "")
            )
    for name in (CALIBRATION, TEST):
        if absent := untrained_labels(pooled[name], labels):
            lines.append(
                f"warning: {len(absent)} of the labels hold of no {name} text, the first is {absent[0]!r}; "
                f"{'the threshold knows nothing of them' if name == CALIBRATION else 'their F1 counts as 0'}"
            )
    return lines


def print_linear_figures(
    console: Console, what: str, config: LinearConfig, figures: dict[str, Any], *, every_class: bool = False
) -> None:
    """Print figures as `linear_figures` gives them, with the weakest classes, or all, and the threshold's warning."""
    lines = figure_lines(what, config, figures)
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    classes = sorted(figures["per_class"], key=lambda score: score["f1"])
    classes = classes if every_class else classes[:WEAKEST_CLASSES]
    title = "every class" if every_class else f"the {len(classes)} weakest classes of {len(config.labels)}"
    table = Table(title=title, title_justify="left")
    for heading in ("label", "texts", "given", "precision", "recall", "F1"):
        table.add_column(heading, justify="left" if heading == "label" else "right")
    for score in classes:
        cells = (f"{score[key]:.3f}" for key in ("precision", "recall", "f1"))
        table.add_row(escape(score["label"]), str(score["examples"]), str(score["predicted"]), *cells)
    console.print(table)


def figure_lines(what: str, config: LinearConfig, figures: dict[str, Any]) -> list[str]:
    """The figures as lines of text."""
    if config.threshold is None:
        return [
            f"{what}: {figures['examples']:,} texts, accuracy {figures['accuracy']:.4f}, macro F1 "
            f"{figures['macro_f1']:.4f}, micro F1 {figures['micro_f1']:.4f}, NLL {figures['nll']:.4f}, "
            f"ECE {figures['ece']:.4f}"
        ]
    rate = figures["false_per_true"]
    lines = [
        f"{what}: {figures['texts']:,} texts, macro F1 {figures['macro_f1']:.4f}, micro F1 {figures['micro_f1']:.4f}, "
        f"exact match {figures['exact_match']:.4f}, NLL of a pair {figures['pair_nll']:.4f}",
        f"at threshold {figures['threshold']:.2f} {figures['predicted_positive_rate']:.1%} of all pairs of text and "
        f"label are given, {figures['positive_rate']:.1%} hold; "
        + ("no true one" if rate is None else f"{rate:.2f} false ones for every true one"),
        f"threshold: {config.threshold.threshold:.2f}; {config.threshold.spread}",
    ]
    if (warning := config.threshold.warning) is not None:
        lines.append(f"warning: threshold {warning}")
    return lines


class _LinearBar:
    """A progress bar for encoding; every epoch leaves a line above it."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "_LinearBar":
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def vectors(self, what: str, done: int, total: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(f"encoding {what}")
        self._progress.update(self._tasks[what], completed=done, total=total)

    def epoch(self, epoch: LinearEpoch) -> None:
        self._progress.console.print(
            f"epoch {epoch.epoch}: loss {epoch.loss:.4f}, validation NLL {epoch.validation_nll:.4f}", soft_wrap=True
        )
