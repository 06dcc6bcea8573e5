"""The command line: classify texts, stay at a prompt, train and evaluate heads."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenalign import __version__
from tokenalign.errors import InputError, TokenAlignError
from tokenalign.label_files import LabelFile
from tokenalign.labels import LabelSet

if TYPE_CHECKING:
    from tokenalign.classifier import TokenAlignClassifier
    from tokenalign.results import Classification
    from tokenalign.terminal import Terminal

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count
TEXTS_AT_A_TIME = 256  # answers of a long input appear while the rest is still being read
DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")

# Their modules need torch, so they are imported only when one of them runs; what `--help` says of them stands here.
TRAIN, EVALUATE, CALIBRATE = (f"tokenalign.training.{name}_command" for name in ("train", "evaluate", "calibrate"))
BULK = "tokenalign.bulk.commands"
COMPRESS = "tokenalign.compression.compress_command"
COMMANDS = {
    "batch": (BULK, "add_batch_parser", "classify the texts of a file; a stopped run goes on"),
    "train": (TRAIN, "add_train_parser", "train a head on a frozen backbone"),
    "evaluate": (EVALUATE, "add_evaluate_parser", "measure heads on messages with labels, beside baselines"),
    "calibrate": (CALIBRATE, "add_calibrate_parser", "fit the calibrations of a head that has none"),
    "compress": (COMPRESS, "add_compress_parser", "make an encoder smaller: fewer layers, fewer tokens"),
}

LABELS_FILE_HELP = (
    "more candidates, one a line: as they stand, or with descriptions, by which they are scored, as "
    '{"name": "…", "description": "…" or ["…", …]}'
)
# What an alignment head alone can be asked, and the value that means that it was not.
NOT_LINEAR: dict[str, object] = {
    "labels": [],
    "labels-file": None,
    "explain": False,
    "multi-label": False,
    "min-score": None,
    "min-margin": None,
    "long-text": "truncate",
    "window-stride": None,
}

EXAMPLE = """example:
  tokenalign --text 'I was charged twice' --labels 'duplicate card payment' 'card not received' --explain

other commands (each has its own --help):
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, 2 after an error that is told on stderr, 130 after Ctrl-C, or what a command gives."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run_command(words) if words and words[0] in COMMANDS else _classify(_parser().parse_args(words))
    except TokenAlignError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return 0


def _run_command(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tokenalign")
    subparsers = parser.add_subparsers(required=True)
    module, add_parser, _ = COMMANDS[words[0]]
    getattr(import_module(module), add_parser)(subparsers)
    options = parser.parse_args(words)
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def _parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  tokenalign {name:<10} {says}" for name, (*_, says) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="tokenalign",
        description="Score texts against label descriptions given with them.",
        epilog=EXAMPLE + listing,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tokenalign {__version__}")

    what = parser.add_argument_group("what to classify")
    source = what.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--text", action="append", metavar="TEXT", help="a text; may be given again; `-` reads one text per input line"
    )
    source.add_argument(
        "--interactive",
        action="store_true",
        help="keep the model loaded and classify each line that is entered; empty input exits",
    )
    what.add_argument("--labels", nargs="+", default=[], metavar="LABEL", help="the candidate descriptions")
    what.add_argument("--labels-file", type=Path, metavar="FILE", help=LABELS_FILE_HELP)

    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", metavar="MODEL", help="a head's folder, hub id or shipped name (default: the shipped)"
    )
    model.add_argument("--revision", help="the hub commit of the head")
    model.add_argument("--backbone", metavar="REFERENCE", help="take the encoder from this folder or reference instead")
    model.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: auto)")
    model.add_argument("--dtype", default="auto", choices=DTYPE_NAMES, help="of the encoder (default: auto)")
    model.add_argument("--cache-dir", metavar="FOLDER", help="Hugging Face cache folder")
    model.add_argument("--local-only", action="store_true", help="download nothing")

    answer = parser.add_argument_group("answer")
    answer.add_argument(
        "--explain",
        nargs="?",
        const=True,
        default=False,
        choices=["all"],
        help="show which words matched for the best label, or with `all` for every label shown",
    )
    answer.add_argument("--top-k", type=int, metavar="K", help="show only the K best labels")
    answer.add_argument("--logits", action="store_true", help="show logits too; then one label is enough")
    answer.add_argument(
        "--multi-label", action="store_true", help="score each label by itself; then one label is enough"
    )
    answer.add_argument(
        "--min-score",
        type=_min_score,
        metavar="P",
        help="name no label when the best score is lower; `calibrated` is the model's own limit",
    )
    answer.add_argument("--min-margin", type=float, metavar="P", help="nor when its lead over the second is smaller")
    answer.add_argument(
        "--long-text",
        default="truncate",
        choices=["truncate", "window", "error"],
        help="cut a text that is too long (default), read it in windows, or refuse it",
    )
    answer.add_argument("--window-stride", type=int, metavar="TOKENS", help="from one window to the next")
    answer.add_argument(
        "--threshold", type=float, metavar="P", help="of a linear head with several labels a text, instead of its own"
    )
    answer.add_argument("--json", action="store_true", help="one JSON object per text and line, nothing else on stdout")
    return parser


def _min_score(word: str) -> float | str:
    try:
        return word if word == "calibrated" else float(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, or `calibrated`, not {word!r}") from error


def _classify(options: argparse.Namespace) -> int:
    return _classify_linear(options) if _is_linear(options) else _classify_described(options)


def _classify_described(options: argparse.Namespace) -> int:
    """By an alignment head, with the candidates of the command line."""
    if options.threshold is not None:
        raise InputError("goes with a linear head, whose labels are fixed; use --min-score", ("threshold",))
    # Checked before the model is loaded, which takes seconds.
    fewest = 1 if options.logits or options.multi_label else 2
    labels = _labels(options.labels, options.labels_file, fewest)
    from tokenalign.terminal import Terminal

    terminal = Terminal()
    classifier = _load(options, terminal.loading())
    warned = False

    def show(texts: list[str]) -> None:
        nonlocal warned
        answers = classifier(
            texts,
            labels,
            explain=options.explain,
            return_logits=options.logits,
            top_k=options.top_k,
            multi_label=options.multi_label,
            min_score=options.min_score,
            min_margin=options.min_margin,
            long_text=options.long_text,
            window_stride=options.window_stride,
        )
        if not warned and answers:
            terminal.warn(answers[0]["warnings"])
            warned = True
        for text, answer in zip(texts, answers, strict=True):
            _print(text, answer, terminal, as_json=options.json)

    return _answer(options, show, terminal)


def _classify_linear(options: argparse.Namespace) -> int:
    """By a linear head, which has labels of its own."""
    for name, unset in NOT_LINEAR.items():
        if getattr(options, name.replace("-", "_")) != unset:
            raise InputError(
                "a linear head has no use for it: labels and windows are its own; leave it out, or --model", (name,)
            )
    from tokenalign.terminal import Terminal

    terminal = Terminal()
    with terminal.loading():
        _quiet_transformers()
        from tokenalign.linear.classifier import LinearClassifier

        classifier = LinearClassifier.from_pretrained(options.model, **_loading(options))
    warned = False

    def show(texts: list[str]) -> None:
        nonlocal warned
        answers = classifier.classify(
            texts, threshold=options.threshold, top_k=options.top_k, return_logits=options.logits
        )
        if not warned and answers:
            terminal.warn(answers[0]["warnings"])
            warned = True
        several = classifier.config.mode == "multi_label"
        for text, answer in zip(texts, answers, strict=True):
            _print(text, answer, terminal, as_json=options.json, given=answer["labels"] if several else None)

    return _answer(options, show, terminal)


def _is_linear(options: argparse.Namespace) -> bool:
    """Whether the model of the command line is a linear head; a hub's is fetched for that where no labels are given."""
    from tokenalign.linear.kind import names_linear

    given = options.model
    if given is not None and not Path(given).expanduser().is_dir() and (options.labels or options.labels_file):
        return False
    return names_linear(
        given, revision=options.revision, cache_dir=options.cache_dir, local_files_only=options.local_only
    )


def _answer(options: argparse.Namespace, show: Callable[[list[str]], None], terminal: "Terminal") -> int:
    if options.interactive:
        _converse(show, terminal, prompt="" if options.json else "text> ")
    else:
        _answer_all(show, _texts(options.text))
    return 0


def _answer_all(show: Callable[[list[str]], None], texts: Iterator[str]) -> None:
    start = 0
    while chunk := list(islice(texts, TEXTS_AT_A_TIME)):
        try:
            show(chunk)
        except InputError as error:
            if error.loc[:1] != ("texts",) or len(error.loc) < 2:
                raise
            raise InputError(error.message, ("texts", int(error.loc[1]) + start)) from error
        start += len(chunk)


def _converse(show: Callable[[list[str]], None], terminal: "Terminal", prompt: str) -> None:
    if not sys.stdin.isatty():
        prompt = ""
    while True:
        try:
            text = input(prompt)
        except EOFError:
            return
        if not text.strip():
            return
        try:
            show([text])
        except InputError as error:
            # A text that can't be read is no reason to load the model again.
            terminal.error(error.message)


def _print(
    text: str, answer: "Classification", terminal: "Terminal", *, as_json: bool, given: list[str] | None = None
) -> None:
    if as_json:
        print(json.dumps({"text": text, **answer}))
    else:
        terminal.show(text, answer, given)
    sys.stdout.flush()  # a reader that left is told here, not at the interpreter's end


def _load(options: argparse.Namespace, waiting: AbstractContextManager[Any]) -> "TokenAlignClassifier":
    with waiting:
        _quiet_transformers()
        from tokenalign.classifier import TokenAlignClassifier

        return TokenAlignClassifier.from_pretrained(options.model, **_loading(options))


def _loading(options: argparse.Namespace) -> dict[str, Any]:
    """The keywords of both classifiers' `from_pretrained`."""
    return {
        "device": options.device,
        "dtype": options.dtype,
        "revision": options.revision,
        "backbone": options.backbone,
        "cache_dir": options.cache_dir,
        "local_files_only": options.local_only,
    }


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves them untyped
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def _texts(given: Iterable[str]) -> Iterator[str]:
    for text in given:
        if text == "-":
            yield from _lines(sys.stdin, "standard input")
        else:
            yield text


def _labels(given: Sequence[str], path: Path | None, fewest: int) -> LabelSet:
    """The labels of the command line, then those of the file; an error about one of the latter names its line."""
    if path is None:
        if not given:
            raise InputError("none given; use --labels or --labels-file", ("labels",))
        return LabelSet.of(given, min_labels=fewest)
    file = LabelFile.read(path)
    try:
        return LabelSet.of([*given, *file.labels], min_labels=fewest)
    except InputError as error:
        if len(error.loc) < 2 or not isinstance(error.loc[1], int) or error.loc[1] < len(given):
            raise
        raise InputError(f"{file.place(('labels', error.loc[1] - len(given)))}: {error.message}") from error


def _lines(lines: Iterable[str], source: str) -> Iterator[str]:
    """The lines that hold something, without their ends."""
    try:
        for line in lines:
            if line.strip():
                yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not UTF-8: {error.reason} at byte {error.start}; convert it") from error


def _forget_stdout() -> None:
    """Keep the interpreter from complaining, at its end, of a reader that left, such as `head`."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
