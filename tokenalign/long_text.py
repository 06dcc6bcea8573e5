"""What becomes of a text of more tokens than the model reads: it is cut, read in windows, or refused."""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tokenalign.errors import InputError, Loc
from tokenalign.text import DEFAULT_MAX_WINDOWS, TextTokenizer, Windowed, check_window_stride, refuse_cut

LongTextMode = Literal["truncate", "window", "error"]
MODES = ("truncate", "window", "error")


@dataclass(frozen=True, slots=True)
class LongText:
    """How texts are read. Build one with `LongText.of`.

    stride: tokens from one window's start to the next's, None for half a window; max_windows: of one text
    """

    mode: LongTextMode = "truncate"
    stride: int | None = None
    max_windows: int = DEFAULT_MAX_WINDOWS

    @classmethod
    def of(
        cls,
        mode: LongTextMode = "truncate",
        stride: int | None = None,
        max_windows: int = DEFAULT_MAX_WINDOWS,
        *,
        window_tokens: int,
    ) -> "LongText":
        """The checked options; `InputError` at `("long_text",)`, `("window_stride",)` or `("max_windows",)`.

        window_tokens: the tokens of a text in one window, `TextTokenizer.window_tokens`
        """
        if mode not in MODES:
            raise InputError(f'must be "truncate", "window" or "error"; it is {reprlib.repr(mode)}', ("long_text",))
        if stride is not None and mode != "window":
            raise InputError(f'only long_text "window" has a stride; long_text is "{mode}"', ("window_stride",))
        if isinstance(max_windows, bool) or not isinstance(max_windows, int) or max_windows < 1:
            raise InputError(
                f"must be a whole number of at least 1; it is {reprlib.repr(max_windows)}", ("max_windows",)
            )
        return cls(mode, check_window_stride(stride, window_tokens), max_windows)

    def read(self, tokenizer: TextTokenizer, texts: Sequence[str], loc: Loc = ("texts",)) -> Windowed:
        """The texts as tokens; `InputError` at `(*loc, i)` for one without any, or that is too long."""
        if self.mode == "window":
            return tokenizer.windows(texts, stride=self.stride, max_windows=self.max_windows, loc=loc)
        tokenized = tokenizer.documents(texts, loc)
        if self.mode == "error":
            refuse_cut(tokenized, loc)
        return Windowed.whole(tokenized)
