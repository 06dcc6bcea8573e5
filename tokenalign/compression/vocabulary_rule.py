"""Which tokens stay: a rule that is written down before anything is made, and looks at no task.

The rule of the cards: the first tokens by id, which are the most frequent, every token that carries a script, the 256
bytes, and all added tokens. Two things are added here unless the rule is taken literally. Pieces of a script's
characters count after a space too, since that is how a word begins in these tokenizers; and the parts stay that kept
tokens are merged from. Without them texts in the script would be spelled otherwise than before, and some kept tokens
would never come out.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tokenalign.compression.bpe import BYTE_CHARACTERS, ByteLevelBpe, token_bytes
from tokenalign.compression.scripts import Script
from tokenalign.errors import CompressionError


@dataclass(frozen=True, slots=True)
class Rule:
    """top: tokens with an id below this stay; scripts: by Unicode name; literal: the cards' rule and nothing else."""

    top: int
    scripts: tuple[str, ...] = ()
    literal: bool = False

    def __post_init__(self) -> None:
        """Raise `CompressionError` for a negative number."""
        if self.top < 0:
            raise CompressionError(f"--top must be 0 or more; it is {self.top}")


@dataclass(frozen=True, slots=True)
class Kept:
    """source_ids: of the tokens that stay, rising, so that a token's new id is its place

    by_reason: how many each part of the rule brought that those before it had not; they sum to the entries
    """

    source_ids: tuple[int, ...]
    by_reason: dict[str, int]

    @property
    def new_ids(self) -> dict[int, int]:
        """New ids by source id."""
        return {source: new for new, source in enumerate(self.source_ids)}


def apply_rule(tokenizer: ByteLevelBpe, rule: Rule) -> Kept:
    """The tokens that stay by a rule; `CompressionError` for an unknown script."""
    kept: set[str] = set()
    by_reason: dict[str, int] = {}

    def keep(reason: str, tokens: Iterable[str]) -> None:
        before = len(kept)
        kept.update(tokens)
        by_reason[reason] = len(kept) - before

    vocabulary = tokenizer.vocabulary
    keep(f"top {rule.top}", (token for token, i in vocabulary.items() if i < rule.top))
    scripts = [Script.named(name) for name in rule.scripts]
    spelled = {token: code for token in vocabulary if (code := token_bytes(token))}
    for script in scripts:
        keep(f"script {script.name}", (token for token, code in spelled.items() if script.carried_by(code)))
    keep("bytes", BYTE_CHARACTERS)
    keep("added tokens", tokenizer.added)
    if not rule.literal:
        after_space = {token: code[1:] for token, code in spelled.items() if code.startswith(b" ")}
        for script in scripts:
            reason = f"{script.name} pieces after a space"
            keep(reason, (token for token, code in after_space.items() if script.carried_by(code)))
        keep("parts of these", _parts_of(kept, tokenizer))
    return Kept(tuple(sorted(tokenizer.ids[token] for token in kept)), by_reason)


def _parts_of(kept: set[str], tokenizer: ByteLevelBpe) -> set[str]:
    """The tokens that the kept ones are merged from, and those that these are merged from, down to bytes."""
    found: set[str] = set()
    waiting = list(kept)
    while waiting:
        for pair in tokenizer.parts.get(waiting.pop(), ()):
            new = [token for token in pair if token not in kept and token not in found]
            found.update(new)
            waiting += new
    return found
