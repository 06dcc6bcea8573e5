"""Log lines of ours among Serve's, each with the id of the request that it is about.

Serve passes over what a replica writes to its standard error, unless it is asked for every detail. So loggers of ours
are joined to Serve's: lines stand in the replica's file, from Serve's level on and in its encoding (`logging_config`),
as JSON with `encoding: JSON`. What a caller sent never stands in one: of an unforeseen error its type is
told and where it happened, and its words only where they can't quote a caller.
"""

import logging
import traceback
from collections.abc import Iterator

from deploy.trail import current_trail
from tokenalign.errors import InputError, TokenAlignError

SERVE = "ray.serve"
"""The logger that Serve documents for lines of an application."""
OURS = ("deploy", "tokenalign")

_SPOKEN = (TokenAlignError, RuntimeError, OSError, MemoryError)
"""Errors of ours, of torch and of the system, which know nothing of texts."""


class JoinedToServe(logging.Handler):
    """Gives a record to Serve's logger, with its request and without what a caller sent."""

    def emit(self, record: logging.LogRecord) -> None:
        """Hands the record on."""
        serve = logging.getLogger(SERVE)
        if not serve.isEnabledFor(record.levelno):
            return
        for name, value in request_fields().items():
            setattr(record, name, value)
        serve.handle(record)


class WithoutQuotes(logging.Filter):
    """Tells the error of a record in words that quote no caller."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets every record pass."""
        if record.exc_info and record.exc_info[1] is not None:
            record.exc_text = "\n".join(told(record.exc_info[1]))  # formatters leave a text that is there as it is
        return True


def join_serve() -> None:
    """Joins our loggers to Serve's, in a replica; once, however often it is called.

    Serve's logger, which tells of errors that a call ends with, is kept from quoting too.
    """
    serve = logging.getLogger(SERVE)
    if not any(isinstance(found, WithoutQuotes) for found in serve.filters):
        serve.addFilter(WithoutQuotes())
    for name in OURS:
        logger = logging.getLogger(name)
        if not any(isinstance(handler, JoinedToServe) for handler in logger.handlers):
            logger.addHandler(JoinedToServe())
        logger.setLevel(serve.getEffectiveLevel())
        logger.propagate = False


def request_fields() -> dict[str, object]:
    """What a line says of whose request it is about: `request_id`, or `request_ids` of a batch."""
    ids = current_trail().request_ids
    if len(ids) == 1:
        return {"request_id": ids[0]}
    return {"request_ids": list(ids)} if ids else {}


def told(error: BaseException) -> Iterator[str]:
    """The lines that are logged of an error: type and places of it and of what led to it, the latest first."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        spoken = isinstance(found, _SPOKEN) and not isinstance(found, InputError)
        yield f"{type(found).__name__}{f': {found}' if spoken else ' (its words may quote a caller)'}"
        for frame in traceback.extract_tb(found.__traceback__):
            yield f"  {frame.filename}:{frame.lineno} in {frame.name}"
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
