"""The command `evaluate`: options in, a report out."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tokenalign.errors import InputError
from tokenalign.linear.classifier import LinearClassifier
from tokenalign.linear.kind import names_linear
from tokenalign.training.assessment import AssessOptions, assess_all
from tokenalign.training.command_options import Subparsers, add_shared_options, count, data_dir, quiet_transformers
from tokenalign.training.document import write_document
from tokenalign.training.held_out import ERASURE_TEXTS, SPLITS
from tokenalign.training.linear_command import print_linear_figures
from tokenalign.training.linear_evaluation import assess_linear
from tokenalign.training.model_card import card_blocks, front_matter
from tokenalign.training.report import comparison_sentence, matches_sentence, report_blocks, trained_sentences
from tokenalign.training.resampling import RESAMPLES
from tokenalign.weights import DEFAULT_MODEL, load_head, locate_head

COLUMNS = {"accuracy": "accuracy", "macro_f1": "macro F1", "nll": "NLL", "brier": "Brier", "ece": "ECE"}
WEAKEST_CLASSES, WORST_PAIRS = 10, 3
# What is asked of alignment heads alone.
ALIGNMENT_MEASURES = (
    *("compare", "test-data", "labels-file", "split", "seed", "out-of-scope", "wordings", "nli", "gliclass"),
    *("cost", "report", "card"),
)


def add_evaluate_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """The parser of `evaluate`; its namespace's `run` measures and gives the exit code."""
    parser = subparsers.add_parser(
        "evaluate",
        help="measure heads on messages with labels, beside baselines",
        description="Measure a head on messages that it was not trained on, beside the cosine of its encoder's "
        "mean-pooled vectors and other baselines.",
    )
    parser.add_argument(
        "--model",
        nargs="+",
        default=[None],
        help="a head's folder, hub id or shipped name; of several, runs of different seeds, the report has means and "
        f"standard deviations too (default: {DEFAULT_MODEL})",
    )
    parser.add_argument("--compare", nargs="+", default=[], metavar="MODEL", help="other heads, on the same messages")
    _add_data(parser)
    _add_measures(parser)
    _add_outputs(parser)
    add_shared_options(parser)
    parser.set_defaults(run=run_evaluate)
    return parser


def _add_data(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("on what")
    data.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="messages with labels: the file that the head was trained on gives its own splits, any other is measured "
        "whole (default: the public data that the head was trained on)",
    )
    data.add_argument("--test-data", type=Path, metavar="FILE", help="the test file that the head was trained with")
    data.add_argument(
        "--labels-file", type=Path, metavar="FILE", help="descriptions of labels (default: the head's own, or names)"
    )
    data.add_argument("--text-column", metavar="NAME", help="default: as the head was trained, or text")
    data.add_argument("--label-column", metavar="NAME", help="default: as the head was trained, or label")
    data.add_argument(
        "--split",
        nargs="+",
        choices=list(SPLITS),
        help="; ".join(f"{name}: {what}" for name, what in SPLITS.items()) + " (default: unseen all)",
    )
    data.add_argument("--seed", type=count, help="the split of a head that doesn't say its own")


def _add_measures(parser: argparse.ArgumentParser) -> None:
    measures = parser.add_argument_group("what else is measured")
    measures.add_argument(
        "--out-of-scope",
        nargs="?",
        const="clinc150",
        metavar="FILE",
        help="how texts that no label fits are told apart: those of a file, or CLINC150's",
    )
    measures.add_argument(
        "--wordings",
        type=Path,
        metavar="FILE",
        help='labels worded otherwise, one a line: {"name": "…", "short": "…", "rich": "…"}, the keys of your choice',
    )
    measures.add_argument("--nli", type=Path, metavar="FOLDER", help="an entailment model to measure beside it")
    measures.add_argument("--gliclass", type=Path, metavar="FOLDER", help="a GLiClass model to measure beside it")
    measures.add_argument("--cost", action="store_true", help="texts a second and peak memory")
    measures.add_argument(
        "--resamples", type=count, default=RESAMPLES, help=f"of the bootstrap; 0: no intervals (default: {RESAMPLES})"
    )
    measures.add_argument(
        "--erasure-texts",
        type=count,
        default=ERASURE_TEXTS,
        help=f"texts to delete matched words from; 0: none (default: {ERASURE_TEXTS})",
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    outputs = parser.add_argument_group("what is written")
    outputs.add_argument("--output", type=Path, metavar="FILE", help="all figures as JSON")
    outputs.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="a report with plots: one HTML page, or Markdown, by the file's name",
    )
    outputs.add_argument("--card", type=Path, metavar="FILE", help="the head's model card, such as RUN/README.md")
    outputs.add_argument("--per-class", action="store_true", help="show every class, not the weakest ones")


def run_evaluate(options: argparse.Namespace) -> int:
    """0 after the report was printed and, if asked for, saved; errors are `TokenAlignError`s."""
    _check_outputs(options)
    quiet_transformers()
    if any(
        names_linear(model, cache_dir=options.cache_dir, local_files_only=options.local_only) for model in options.model
    ):
        return _run_linear(options)
    out_of_scope = _out_of_scope(options.out_of_scope)
    console = Console(stderr=True, highlight=False)
    with console.status("…") as status:
        report = assess_all(
            options.model,
            AssessOptions(
                model=None,
                data_dir=data_dir(options),
                splits=None if options.split is None else tuple(options.split),
                data=options.data,
                test_data=options.test_data,
                labels=options.labels_file,
                text_column=options.text_column,
                label_column=options.label_column,
                seed=options.seed,
                compare=tuple(options.compare),
                erasure_texts=options.erasure_texts,
                resamples=options.resamples,
                out_of_scope=out_of_scope,
                wordings=options.wordings,
                nli=options.nli,
                gliclass=options.gliclass,
                cost=options.cost,
                backbone=options.backbone,
                device=options.device,
                dtype=options.dtype,
                cache_dir=options.cache_dir,
                local_only=options.local_only,
            ),
            on_step=lambda what: status.update(f"{escape(what)} …"),
        )
    _write(options, report)
    out = Console(file=sys.stdout, highlight=False)
    for run in report.get("runs", [report]):
        if run["trained_on"]:
            out.print(f"warning: the head was trained on {run['trained_on']:,} of these messages", soft_wrap=True)
        for name, result in run["results"].items():
            print_result(out, name, result, every_class=options.per_class)
    if "summary" in report:
        print_summary(out, report["summary"])
    return 0


def _run_linear(options: argparse.Namespace) -> int:
    """Measure linear heads on a file, each by itself."""
    if options.data is None:
        raise InputError("none given; a linear head is measured on texts with its own labels", ("data",))
    for name in ALIGNMENT_MEASURES:
        if getattr(options, name.replace("-", "_")):
            raise InputError("a linear head has no use for it, or isn't measured so; leave it out", (name,))
    console = Console(file=sys.stdout, highlight=False)
    where = {"cache_dir": options.cache_dir, "local_files_only": options.local_only}
    report = []
    for model in options.model:
        classifier = LinearClassifier.from_pretrained(
            model, device=options.device, dtype=options.dtype, backbone=options.backbone, **where
        )
        found = assess_linear(
            classifier,
            locate_head(model, **where),
            options.data,
            text_column=options.text_column,
            label_column=options.label_column,
        )
        if found.trained_on:
            console.print(f"warning: {model} was trained on {found.trained_on:,} of these texts", soft_wrap=True)
        print_linear_figures(console, found.what, classifier.config, found.figures, every_class=options.per_class)
        report.append({"model": str(model), "data": found.what, "figures": found.figures})
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def _out_of_scope(word: str | None) -> Path | Literal["clinc150"] | None:
    return None if word is None else "clinc150" if word == "clinc150" else Path(word)


def _check_outputs(options: argparse.Namespace) -> None:
    for name in ("output", "report", "card"):
        path: Path | None = getattr(options, name)
        if path is not None and not path.parent.is_dir():
            raise InputError(f"folder {path.parent} does not exist; make it, or save it elsewhere", (name,))
    if options.card is not None and len(options.model) > 1:
        raise InputError("is of one head; give one --model, or leave --card out", ("card",))


def _write(options: argparse.Namespace, report: dict[str, Any]) -> None:
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.report is not None:
        write_document(options.report, report_blocks(report))
    if options.card is not None:
        folder = locate_head(options.model[0], cache_dir=options.cache_dir, local_files_only=options.local_only)
        config = load_head(folder)[0]
        write_document(options.card, card_blocks(config, report), front_matter(config))


def print_result(console: Console, name: str, result: dict[str, Any], *, every_class: bool) -> None:
    """Print one split's figures: the head beside the baselines, what its matches mean, and its classes."""
    figures = result["model"]
    table = Table(title=f"{name}: {figures['examples']:,} messages, {figures['classes']} labels", title_justify="left")
    table.add_column("")
    for heading in COLUMNS.values():
        table.add_column(heading, justify="right")
    for row, metrics in {"this head": figures, **result["baselines"], **result["others"]}.items():
        table.add_row(escape(row), *(f"{metrics[key]:.3f}" for key in COLUMNS))
    console.print(table)
    lines = [comparison_sentence(other, found) for other, found in result["comparisons"].items()]
    lines += trained_sentences(result)
    lines += [f"{what}: left out, {why}" for what, why in result["skipped"].items()]
    lines.append(matches_sentence(result["matches"]))
    if (scope := result.get("out_of_scope")) is not None:
        best, found = max(scope["model"].items(), key=lambda item: float(item[1]["auroc"]))
        lines.append(
            f"Out of scope, by {best}: AUROC {found['auroc']:.3f}, answered where 95 % of these messages are: "
            f"{found['fpr_at_95_recall']:.1%}"
        )
    for wording, found in result.get("wordings", {}).items():
        lines.append(
            f"Labels worded {wording!r}: accuracy {found['accuracy']:.3f}, probability of the right one "
            f"{found['right_probability']:.3f}"
        )
    for pair in figures["confusions"][:WORST_PAIRS]:
        lines.append(f"Worst pair: {pair['label']} answered as {pair['predicted']}, {_times(pair['examples'])}")
    console.print("\n".join(lines), soft_wrap=True, markup=False)
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
            escape(score["label"]),
            str(score["examples"]),
            *(f"{score[key]:.3f}" for key in ("precision", "recall", "f1")),
        )
    console.print(details)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def print_summary(console: Console, summary: dict[str, Any]) -> None:
    """Print means and standard deviations over runs."""
    for split, rows in summary.items():
        table = Table(title=f"{split}: mean and standard deviation over runs", title_justify="left")
        for heading in ("", "runs", *COLUMNS.values()):
            table.add_column(heading, justify="left" if not heading else "right")
        for name, figures in rows.items():
            cells = [f"{figures[key]['mean']:.3f} ± {figures[key]['sd']:.3f}" for key in COLUMNS]
            table.add_row(name, str(figures["accuracy"]["runs"]), *cells)
        console.print(table)
