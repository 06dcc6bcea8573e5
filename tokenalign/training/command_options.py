"""What the commands of training share: their parsers' common options, and folders that hold by default."""

import argparse
from pathlib import Path
from typing import Protocol

from tokenalign.backbone import DTYPES


class Subparsers(Protocol):
    """What argparse's `add_subparsers` gives, which has no public name."""

    def add_parser(self, name: str, *, help: str, description: str) -> argparse.ArgumentParser:
        """A new command's parser."""
        ...


def add_shared_options(parser: argparse.ArgumentParser) -> None:
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


def count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, not {value}")
    return value


def cache_home() -> Path:
    return Path.home() / ".cache" / "tokenalign"


def data_dir(options: argparse.Namespace) -> Path:
    folder: Path = options.data_dir or cache_home() / "data"
    return folder


def quiet_transformers() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves them untyped
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
