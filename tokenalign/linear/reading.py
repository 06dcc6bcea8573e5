"""How a linear head reads texts: in windows of tokens, each of which becomes one vector."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenalign.errors import ConfigError, Loc
from tokenalign.linear.config import STRIDE, WINDOW, LinearConfig, Pooling
from tokenalign.text import DEFAULT_MAX_WINDOWS, TextTokenizer, Windowed


@dataclass(frozen=True, slots=True)
class Reading:
    """Windows and pooling, as `LinearConfig` says them."""

    pooling: Pooling
    window: int = WINDOW
    stride: int = STRIDE
    max_windows: int = DEFAULT_MAX_WINDOWS

    @classmethod
    def of(cls, config: LinearConfig) -> "Reading":
        """The reading of a head."""
        return cls(config.pooling, config.window, config.stride, config.max_windows)

    def windows(self, tokenizer: TextTokenizer, texts: Sequence[str], loc: Loc = ("texts",)) -> Windowed:
        """The texts in windows; the tokenizer's max_length is the window.

        Raises `InputError` at `(*loc, i)` for a text without any token or of too many windows, `ConfigError` for a
        stride that leaves gaps.
        """
        room = tokenizer.window_tokens
        if self.stride > room:
            raise ConfigError(
                f"stride: {self.stride} leaves gaps between windows, which hold {room} tokens of a text "
                "beside special ones; lower it"
            )
        return tokenizer.windows(texts, stride=self.stride, max_windows=self.max_windows, loc=loc)
