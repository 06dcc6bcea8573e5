"""The command `compress`: its steps' options in, folders of smaller models out."""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from tokenalign.backbone import DTYPES
from tokenalign.compression.counting import Counts, count
from tokenalign.compression.layers import CARD_LAYERS, kept_config
from tokenalign.compression.model_folder import find_folder, text_config
from tokenalign.compression.steps import Source, cut_layers
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


def count_lines(counts: Counts) -> list[str]:
    """Counts as lines for a reader."""
    short = {"linear_attention": "linear", "full_attention": "full"}
    types = "" if counts.layer_types is None else f" ({', '.join(short.get(t, t) for t in counts.layer_types)})"
    lines = [
        f"  layers               {counts.layers}{types}",
        f"  parameters           {counts.parameters:,}",
        f"  embedding            {counts.embedding_parameters:,} in {counts.rows:,} rows, "
        f"{counts.embedding_share:.1%} of all",
        f"  all but embedding    {counts.stack_parameters:,}",
        f"  model.safetensors    {counts.file_bytes:,} bytes ({counts.file_bytes / 2**20:.1f} MiB)",
    ]
    if counts.recurrent_scalars:
        lines.append(f"  recurrent scalars    {counts.recurrent_scalars}, which distillation leaves as they are")
    return lines


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
