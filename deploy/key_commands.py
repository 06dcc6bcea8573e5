"""`tokenalign-deploy keys`: makes API keys."""

import argparse
import re

from deploy.http.keys import NAME, hash_of, new_key
from tokenalign.errors import ConfigError


def add_keys_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `keys` and its own commands to a parser."""
    keys = commands.add_parser("keys", help="make API keys")
    new = keys.add_subparsers(dest="keys_command", required=True).add_parser(
        "new",
        help="make an API key",
        description="Prints a new API key for its owner, and the line with its hash for the file that access.keys_file "
        "names. Nothing is written anywhere, and the key can't be had from the hash again.",
    )
    new.add_argument("name", help="whose key it is: for metrics, and for whose label sets and cached labels are whose")


def print_new_key(options: argparse.Namespace) -> None:
    """Prints what `keys new` promises; `ConfigError` for a name that is none."""
    if re.fullmatch(NAME, options.name, re.ASCII) is None:
        raise ConfigError(
            f"name: is {options.name!r}; use letters, digits, dots, hyphens and underscores, at most 64 of them"
        )
    key = new_key()
    print(f"key:  {key}\nline: {options.name} {hash_of(key)}")
