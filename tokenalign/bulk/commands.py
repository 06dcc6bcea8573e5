"""The command `batch`: a file of texts in, a file of answers out."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tokenalign.backbone import DEFAULT_MAX_BATCH_TOKENS, DTYPES
from tokenalign.bulk.answering import Classifier, Question
from tokenalign.bulk.linear import LinearForBulk
from tokenalign.bulk.opening import FORMATS, format_of
from tokenalign.bulk.output import OutputPaths
from tokenalign.bulk.progress import Done, reporter
from tokenalign.bulk.reading import Source
from tokenalign.bulk.rows import Columns
from tokenalign.bulk.run import Job, Summary, run_bulk
from tokenalign.classifier import TokenAlignClassifier
from tokenalign.config import CONFIG_FILE
from tokenalign.errors import InputError
from tokenalign.label_files import LabelFile
from tokenalign.labels import LabelSet
from tokenalign.linear.classifier import LinearClassifier
from tokenalign.linear.config import LinearConfig
from tokenalign.linear.kind import names_linear
from tokenalign.results import Warning_, check_top_k
from tokenalign.terminal import Terminal
from tokenalign.weights import locate_head

EXIT_BAD_ROWS = 3
EXIT_INTERRUPTED = 130

DESCRIPTION = """\
Classify the texts of a file against the labels of another: one JSON line for each good row, in their order. Rows that
can't be read go to a side file with the reason. A run that was stopped goes on when the same command is given again.
Exit status: 0 every row was answered, 3 some rows are in the side file, 2 an error that is told, 130 after Ctrl-C."""


class Subparsers(Protocol):
    """What argparse's `add_subparsers` gives, which has no public name."""

    def add_parser(self, name: str, *, help: str, description: str) -> argparse.ArgumentParser:
        """A new command's parser."""
        ...


def add_batch_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """The parser of `batch`; its namespace's `run` classifies and gives the exit code."""
    parser = subparsers.add_parser("batch", help="classify the texts of a file", description=DESCRIPTION)
    add_job_options(parser)
    parser.add_argument(
        "--threshold", type=float, metavar="P", help="of a linear head with several labels a text, instead of its own"
    )
    add_model_options(parser)
    parser.set_defaults(run=run_batch)
    return parser


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """What is read, asked and written; `job_of` reads it."""
    parser.add_argument("input", help="JSON Lines, CSV, TSV or Parquet; - reads JSON Lines from standard input")
    parser.add_argument("output", type=Path, help="JSON Lines: row, label, score, and what else is asked for")
    parser.add_argument("--format", choices=FORMATS, help="of the input (default: by its name)")
    parser.add_argument(
        "--labels-file",
        type=Path,
        metavar="FILE",
        help="needed but for a linear head: one label a line; a line that begins with { is JSON: "
        '{"name": "…", "description": "…" or ["…", …]}',
    )
    parser.add_argument("--text-column", default="text", metavar="NAME", help="default: %(default)s")
    parser.add_argument("--id-column", metavar="NAME", help="a column that each answer repeats as `id`")
    parser.add_argument("--top-k", metavar="K", help="list the scores of the K best labels, or of `all`")
    parser.add_argument(
        "--explain",
        nargs="?",
        const=True,
        default=False,
        choices=["all"],
        help="add which words matched for the best label, or with `all` for every label listed",
    )
    parser.add_argument(
        "--max-batch-tokens",
        type=int,
        default=DEFAULT_MAX_BATCH_TOKENS,
        help="tokens that the encoder computes at a time, padding included (default: %(default)s)",
    )
    parser.add_argument(
        "--errors", type=Path, metavar="FILE", help="side file for bad rows (default: the output's name, .errors.jsonl)"
    )
    parser.add_argument("--overwrite", action="store_true", help="start anew, whatever stands in the output")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which model answers; `model_options` reads it."""
    parser.add_argument("--model", help="a head's folder, hub id or shipped name (default: the shipped)")
    parser.add_argument("--revision", help="the hub commit of the head")
    parser.add_argument(
        "--backbone", metavar="REFERENCE", help="take the encoder from this folder or reference instead"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: auto)")
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPES], help="of the encoder (default: auto)")
    parser.add_argument("--cache-dir", metavar="FOLDER", help="Hugging Face cache folder")
    parser.add_argument("--local-only", action="store_true", help="download nothing")


def job_of(options: argparse.Namespace, linear: LinearConfig | None = None) -> Job:
    """The job of a command line; `InputError` or `ConfigError` where an option is wrong.

    linear: of the head, where it is a linear one
    """
    path = None if options.input == "-" else Path(options.input)
    if options.max_batch_tokens < 1:
        raise InputError(f"is {options.max_batch_tokens}; give at least 1", ("max-batch-tokens",))
    return Job(
        source=Source(
            path=path,
            format=options.format or ("jsonl" if path is None else format_of(path)),
            columns=Columns(options.text_column, options.id_column),
        ),
        question=Question(
            labels=_labels(options, linear),
            explain=options.explain,
            scores=options.top_k is not None,
            top_k=_top_k(options.top_k),
            max_batch_tokens=options.max_batch_tokens,
            several=linear is not None and linear.mode == "multi_label",
        ),
        paths=OutputPaths.of(options.output, options.errors),
        overwrite=options.overwrite,
    )


def _labels(options: argparse.Namespace, linear: LinearConfig | None) -> LabelSet:
    if linear is None:
        if options.labels_file is None:
            raise InputError("none given; an alignment head is told its labels in a file", ("labels-file",))
        return LabelFile.read(options.labels_file).label_set()
    for name in ("labels_file", "explain"):
        if getattr(options, name):
            raise InputError(
                "a linear head has no use for it: its labels are its own; leave it out", (name.replace("_", "-"),)
            )
    return LabelSet.of(linear.labels, min_labels=1)


def model_options(options: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `TokenAlignClassifier.from_pretrained`."""
    return {
        "id_or_path": options.model,
        "revision": options.revision,
        "backbone": options.backbone,
        "device": options.device,
        "dtype": options.dtype,
        "cache_dir": options.cache_dir,
        "local_files_only": options.local_only,
    }


def load_classifier(options: dict[str, Any]) -> TokenAlignClassifier:
    """The classifier, loaded without transformers' own progress bars."""
    _quiet_transformers()
    return TokenAlignClassifier.from_pretrained(**options)


def run_batch(options: argparse.Namespace) -> int:
    """0 when every row was answered, 3 when some were bad, 130 after Ctrl-C; errors are `TokenAlignError`s."""
    model = model_options(options)
    linear = _linear_config(model)
    job = job_of(options, linear)

    def load() -> Classifier:
        if linear is None:
            return load_classifier(model)
        _quiet_transformers()
        return LinearForBulk(LinearClassifier.from_pretrained(**model), options.threshold)

    if linear is None and options.threshold is not None:
        raise InputError("goes with a linear head, whose labels are fixed; leave it out", ("threshold",))
    return run_and_tell(
        job,
        lambda on_progress, on_warnings: run_bulk(job, load, on_progress=on_progress, on_warnings=on_warnings),
    )


def _linear_config(model: dict[str, Any]) -> LinearConfig | None:
    """The configuration of the model where it is a linear head."""
    where = {name: model[name] for name in ("revision", "cache_dir", "local_files_only")}
    if not names_linear(model["id_or_path"], **where):
        return None
    return LinearConfig.load(locate_head(model["id_or_path"], **where) / CONFIG_FILE)


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves them untyped
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]


Run = Callable[[Callable[[Done], None], Callable[[list[Warning_]], None]], Summary]


def run_and_tell(job: Job, run: Run) -> int:
    """The exit code of a run that is watched on stderr, and told of in a line there at its end."""
    if job.paths.progress.exists() and not job.overwrite:
        print(f"going on with the unfinished run of {job.paths.output}", file=sys.stderr)
    latest = Done(0, 0, 0, None)
    try:
        with reporter(sys.stderr) as tell:

            def progress(done: Done) -> None:
                nonlocal latest
                latest = done
                tell(done)

            summary = run(progress, Terminal().warn)
    except KeyboardInterrupt:
        how = "the same command goes on from there" if job.source.path is not None else "it can't be gone on with"
        print(f"\nstopped after {latest.rows:,} rows; {how}", file=sys.stderr)
        return EXIT_INTERRUPTED
    bad = f"; {summary.bad:,} bad rows: {job.paths.errors}" if summary.bad else ""
    print(f"{summary.good:,} rows answered: {job.paths.output}{bad}", file=sys.stderr)
    return EXIT_BAD_ROWS if summary.bad else 0


def _top_k(given: str | None) -> int | None:
    if given is None or given == "all":
        return None
    if not given.isascii() or not given.isdigit():
        raise InputError(f"must be a whole number of at least 1, or all; it is {given!r}", ("top-k",))
    check_top_k(int(given))
    return int(given)
