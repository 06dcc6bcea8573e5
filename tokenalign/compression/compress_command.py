"""The command `compress`: its steps' options in, folders of smaller models out."""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from tokenalign.backbone import DTYPES
from tokenalign.compression.command_output import count_lines, entry_lines, growth_lines, loss_words, step_bar
from tokenalign.compression.counting import count
from tokenalign.compression.distillation import Options, Record
from tokenalign.compression.distillation_step import distil_student
from tokenalign.compression.layer_step import cut_layers
from tokenalign.compression.layers import CARD_LAYERS, kept_config
from tokenalign.compression.model_folder import Source, find_folder, text_config
from tokenalign.compression.token_growth import SAMPLES, read_samples
from tokenalign.compression.vocabulary_rule import Rule
from tokenalign.compression.vocabulary_step import cut_vocabulary
from tokenalign.training.command_options import Subparsers, quiet_transformers

CARD_MAPS = ", ".join(f"{layers}: {','.join(map(str, kept))}" for layers, kept in CARD_LAYERS.items())
EXAMPLE = """example, from 24 layers to 8:
  tokenalign compress layers --model teacher --layers 0,4,6,11,13,16,20,23 --output kept8
  tokenalign compress distil --teacher teacher --student kept8 --text texts.jsonl --output student8
  tokenalign compress vocabulary --model student8 --top 32768 --script Hangul --output student8-small
"""


def add_compress_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """The parser of `compress`; its namespace's `run` runs the step and gives the exit code."""
    parser = subparsers.add_parser(
        "compress",
        help="make an encoder smaller",
        description="Make an encoder smaller, step by step; each writes a fresh folder with a manifest of hashes.",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLE
    steps = parser.add_subparsers(required=True, metavar="STEP")
    _add_count(steps)
    _add_layers(steps)
    _add_distil(steps)
    _add_vocabulary(steps)
    return parser


def _add_count(steps: Subparsers) -> None:
    step = steps.add_parser(
        "count",
        help="parameters and bytes, from config.json alone",
        description="Count parameters and bytes of a model as it is, or as it would be; no weights are needed.",
    )
    _add_model(step)
    step.add_argument("--layers", type=layer_numbers, metavar="N,N,…", help="count with these layers alone")
    step.add_argument("--rows", type=positive, metavar="N", help="count with so many rows of the embedding table")
    _add_dtype(step, ["source"])
    step.set_defaults(run=_quietly(run_count))


def _add_layers(steps: Subparsers) -> None:
    step = steps.add_parser(
        "layers",
        help="keep chosen layers",
        description=f"Keep chosen layers with their weights. The maps of the Qwen3.5 cards, by layers: {CARD_MAPS}.",
    )
    _add_model(step)
    step.add_argument("--layers", type=layer_numbers, required=True, metavar="N,N,…", help="which, from 0, rising")
    _add_dtype(step, ["source"])
    _add_output(step)
    step.set_defaults(run=_quietly(run_layers))


def _add_distil(steps: Subparsers) -> None:
    defaults = Options()
    step = steps.add_parser(
        "distil",
        help="train kept layers to give the teacher's states",
        description="Train a student of kept layers to give its teacher's hidden states on unlabelled text.",
    )
    _add_model(step, "--teacher")
    step.add_argument(
        "--student", type=Path, required=True, metavar="FOLDER", help="what `compress layers` made of the teacher"
    )
    step.add_argument(
        "--text", type=Path, required=True, metavar="FILE", help="texts: .txt, a line each, or JSON Lines, CSV, Parquet"
    )
    step.add_argument("--text-column", default="text", metavar="NAME", help="default: text")
    step.add_argument("--epochs", type=positive, default=defaults.epochs, help="default: %(default)s")
    step.add_argument("--batch-size", type=positive, default=defaults.batch_size, help="default: %(default)s")
    step.add_argument("--learning-rate", type=float, default=defaults.learning_rate, help="default: %(default)s")
    step.add_argument(
        "--max-length", type=positive, default=defaults.max_length, metavar="TOKENS", help="default: %(default)s"
    )
    step.add_argument(
        "--held-out", type=float, default=defaults.held_out_share, metavar="SHARE", help="default: %(default)s"
    )
    step.add_argument(
        "--interface-weight",
        type=float,
        default=defaults.interface_weight,
        metavar="SHARE",
        help="of the states between layers in the loss, the rest is of the final states (default: %(default)s)",
    )
    step.add_argument("--freeze-embedding", action="store_true", help="leave the embedding table as it is")
    step.add_argument("--seed", type=int, default=defaults.seed, help="default: %(default)s")
    step.add_argument(
        "--checkpoint-steps", type=positive, default=defaults.checkpoint_steps, metavar="N", help="default: %(default)s"
    )
    step.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default: auto)")
    _add_dtype(step, [])
    step.add_argument("--resume", action="store_true", help="go on with an interrupted run of the same options")
    _add_output(step)
    step.set_defaults(run=_quietly(run_distil))


def _add_vocabulary(steps: Subparsers) -> None:
    step = steps.add_parser(
        "vocabulary",
        help="keep the tokens of a rule",
        description="Cut the vocabulary of a byte-level BPE by a rule, and the rows of the embedding table with it. "
        "The 256 bytes and all added tokens always stay, so every text can still be spelled.",
    )
    _add_model(step)
    step.add_argument("--top", type=int, required=True, metavar="N", help="keep the tokens with an id below N")
    step.add_argument(
        "--script",
        action="append",
        default=[],
        metavar="NAME",
        help="keep every token that carries this Unicode script, such as Hangul; may be given again",
    )
    step.add_argument(
        "--literal",
        action="store_true",
        help="the cards' rule and nothing else; by default pieces of a script's characters stay after a space too, "
        "and so does what kept tokens are merged from, without which some may never come out",
    )
    step.add_argument(
        "--samples",
        type=Path,
        metavar="FILE",
        help="rows with `language` and `text`, whose tokens are counted before and after (default: a sentence in each "
        "of some languages)",
    )
    _add_output(step)
    step.set_defaults(run=_quietly(run_vocabulary))


def run_count(options: argparse.Namespace) -> int:
    """Print the counts."""
    config = text_config(_folder(options, options.model, weights=False))
    if options.layers is not None:
        config = kept_config(config, options.layers)
    if options.rows is not None:
        config.vocab_size = options.rows
        config.pad_token_id = None  # it is a row, and may lie beyond those that are counted
    dtype = _dtype(options)
    print("\n".join(count_lines(count(config, dtype or config.dtype or torch.float32))))
    return 0


def run_layers(options: argparse.Namespace) -> int:
    """Write the model of the kept layers."""
    source = Source(_folder(options, options.model), options.model, options.revision)
    counts = cut_layers(source, options.layers, options.output, _dtype(options))
    print("\n".join([f"{options.output}:", *count_lines(counts)]))
    return 0


def run_distil(options: argparse.Namespace) -> int:
    """Write the distilled student, with a bar on the way."""
    teacher = Source(_folder(options, options.teacher), options.teacher, options.revision)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with step_bar(console) as bar:
        task = bar.add_task("distilling", note="")

        def show(step: int, steps: int, record: Record) -> None:
            note = f"loss {record['total']:.4f}" if "total" in record else ""
            bar.update(task, completed=step, total=steps, note=note)
            if "held_out" in record:
                bar.console.print(f"step {step}: {loss_words(record['held_out'])} on held-out texts")

        found = distil_student(
            teacher,
            options.student,
            options.text,
            options.output,
            Options(
                epochs=options.epochs,
                batch_size=options.batch_size,
                learning_rate=options.learning_rate,
                max_length=options.max_length,
                held_out_share=options.held_out,
                interface_weight=options.interface_weight,
                freeze_embedding=options.freeze_embedding,
                seed=options.seed,
                checkpoint_steps=options.checkpoint_steps,
            ),
            text_column=options.text_column,
            device=options.device,
            dtype=DTYPES[options.dtype],
            resume=options.resume,
            on_step=show,
        )
    lines = [f"{options.output}:", *count_lines(found.counts), "  on held-out texts"]
    lines += [f"    before             {loss_words(found.start)}", f"    as saved           {loss_words(found.saved)}"]
    print("\n".join(lines))
    return 0


def run_vocabulary(options: argparse.Namespace) -> int:
    """Write the model with the tokens of the rule."""
    source = Source(_folder(options, options.model), options.model, options.revision)
    rule = Rule(options.top, tuple(options.script), literal=options.literal)
    samples = SAMPLES if options.samples is None else read_samples(options.samples)
    cut = cut_vocabulary(source, rule, options.output, samples)
    lines = [f"{options.output}:", *count_lines(cut.counts), *entry_lines(cut.kept, cut.tokens_before)]
    print("\n".join([*lines, *growth_lines(cut.growth)]))
    return 0


def layer_numbers(word: str) -> tuple[int, ...]:
    """The numbers of `0,4,6`."""
    try:
        return tuple(int(number) for number in word.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between, as 0,4,6; it is {word!r}") from error


def positive(word: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {word!r}") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _add_model(step: argparse.ArgumentParser, name: str = "--model") -> None:
    step.add_argument(name, required=True, metavar="REFERENCE", help="a folder, hub id or package:NAME")
    step.add_argument("--revision", help="its commit, needed with a hub id")
    step.add_argument("--cache-dir", metavar="FOLDER", help="Hugging Face cache folder")
    step.add_argument("--local-only", action="store_true", help="download nothing")


def _add_dtype(step: argparse.ArgumentParser, others: list[str]) -> None:
    step.add_argument(
        "--dtype",
        choices=[*DTYPES, *others],
        default="bfloat16",
        help="of the file that is written (default: bfloat16)",
    )


def _add_output(step: argparse.ArgumentParser) -> None:
    step.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="a fresh folder")


def _dtype(options: argparse.Namespace) -> torch.dtype | None:
    return DTYPES.get(options.dtype)


def _folder(options: argparse.Namespace, reference: str, *, weights: bool = True) -> Path:
    return find_folder(
        reference,
        revision=options.revision,
        cache_dir=options.cache_dir,
        local_files_only=options.local_only,
        weights=weights,
    )


def _quietly(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The step, without what transformers prints of its own."""

    def quiet(options: argparse.Namespace) -> int:
        quiet_transformers()
        return run(options)

    return quiet
