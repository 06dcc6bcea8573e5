"""Reading the JSON objects of a dialect key by key, with errors that say where in that dialect a value stands."""

import reprlib
from collections.abc import Sequence
from typing import Any

from deploy.http.limits import json_type
from tokenalign.errors import InputError, Loc

MAX_SHOWN_KEY_CHARS = 100


class Fields:
    """The keys of one JSON object. A key that is null counts as absent, since clients of many languages send it so.

    loc: where the object stands in the request
    """

    def __init__(self, value: object, known: Sequence[str], loc: Loc = ()) -> None:
        """`InputError` unless `value` is an object without other keys than the known ones."""
        if not isinstance(value, dict):
            raise InputError(f"must be an object, not {json_type(value)}", loc)
        for key in value:
            if key not in known:
                # A key may be long, or hold a lone surrogate, which no answer could repeat.
                shown = key[:MAX_SHOWN_KEY_CHARS].encode("utf-8", "backslashreplace").decode("utf-8")
                raise InputError(f"is not a key of this request; it takes {', '.join(known)}", (*loc, shown))
        self.loc = loc
        self._values = {key: value for key, value in value.items() if value is not None}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def at(self, key: str) -> Loc:
        """Where a key stands in the request."""
        return (*self.loc, key)

    def get(self, key: str) -> Any:
        """The value of a key as it was sent; None where there is none."""
        return self._values.get(key)

    def required(self, key: str, what: str) -> Any:
        """The value of a key; `InputError` saying what to send where there is none."""
        if key not in self._values:
            raise InputError(f"is missing; send {what}", self.at(key))
        return self._values[key]

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false."""
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise InputError(f"must be true or false; it is {reprlib.repr(value)}", self.at(key))
        return value

    def text(self, key: str) -> str | None:
        """A string, None where there is none. What a string may hold is checked where it is used."""
        value = self._values.get(key)
        return None if value is None else string(value, self.at(key))

    def whole(self, key: str) -> int | None:
        """A whole number, None where there is none."""
        value = self._values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise InputError(f"must be a whole number; it is {reprlib.repr(value)}", self.at(key))
        return value

    def count(self, key: str) -> int | None:
        """A whole number of at least 1, None where there is none."""
        value = self.whole(key)
        if value is not None and value < 1:
            raise InputError(f"must be at least 1; it is {reprlib.repr(value)}", self.at(key))
        return value

    def nested(self, key: str, known: Sequence[str]) -> "Fields":
        """The object under a key, an empty one where there is none."""
        return Fields(self._values.get(key, {}), known, self.at(key))


def string(value: object, loc: Loc) -> str:
    """`value` itself; `InputError` unless it is a string."""
    if not isinstance(value, str):
        raise InputError(f"must be a string, not {json_type(value)}", loc)
    return value


def array(value: object, loc: Loc, of: str) -> list[Any]:
    """`value` itself; `InputError` unless it is a list with something in it. `of`: what it should hold."""
    if not isinstance(value, list):
        raise InputError(f"must be a list of {of}, not {json_type(value)}", loc)
    if not value:
        raise InputError(f"is an empty list; send at least one of the {of}", loc)
    return value


def strings(value: object, loc: Loc, of: str = "strings") -> list[str]:
    """`value` itself; `InputError` unless it is a list of strings with something in it."""
    return [string(item, (*loc, i)) for i, item in enumerate(array(value, loc, of))]


def one_or_many(value: object, loc: Loc) -> str | list[str]:
    """`value` itself; `InputError` unless it is a string, or a list of strings with something in it."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InputError(f"must be a string or a list of strings, not {json_type(value)}", loc)
    return strings(value, loc)
