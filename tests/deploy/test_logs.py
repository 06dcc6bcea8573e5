"""A log line says which request it is about, and nothing of what that asked."""

import logging
from collections.abc import Iterator

import pytest

from deploy.logs import OURS, SERVE, JoinedToServe, join_serve, told
from deploy.trail import Trail, working_for
from tokenalign.errors import InputError, NumericalError


class Lines(logging.Handler):
    """Keeps what Serve's logger was given."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def lines() -> Iterator[Lines]:
    """Our loggers joined to Serve's, whose level is WARNING; all as it was afterwards."""
    loggers = [logging.getLogger(name) for name in (SERVE, *OURS)]
    before = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    kept, serve = Lines(), loggers[0]
    serve.handlers, serve.propagate = [kept], False
    serve.setLevel(logging.WARNING)
    join_serve()
    yield kept
    serve.filters.clear()
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_lines_reach_serves_logger_once(lines: Lines) -> None:
    """From Serve's level on, from any module of ours, once however often loggers were joined, and nobody else."""
    join_serve()
    others = Lines()
    logging.getLogger().addHandler(others)
    logging.getLogger("deploy.ingress").info("not this")
    logging.getLogger("deploy.ingress").warning("this")
    logging.getLogger("tokenalign.backbone").error("and this")
    assert [record.getMessage() for record in lines.records] == ["this", "and this"]
    logging.getLogger().removeHandler(others)
    assert others.records == []


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ((), {}),
        (("a",), {"request_id": "a"}),
        (("a", "b"), {"request_ids": ["a", "b"]}),
    ],
)
def test_a_line_names_its_requests(lines: Lines, ids: tuple[str, ...], expected: dict[str, object]) -> None:
    """One request as request_id, those of a batch as request_ids, and nobody's work names none."""
    with working_for(Trail(ids)):
        logging.getLogger("deploy.scorer").warning("slow")
    logging.getLogger("deploy.scorer").warning("afterwards")
    first, second = (vars(record) for record in lines.records)
    assert {key: value for key, value in first.items() if key.startswith("request_id")} == expected
    assert not any(key.startswith("request_id") for key in second)


@pytest.mark.parametrize("name", ["deploy.http", SERVE])
def test_an_error_is_told_without_a_callers_words(lines: Lines, name: str) -> None:
    """Type and places of an error and of its cause are told, words that may quote a caller not; by Serve neither."""
    try:
        try:
            {}["the caller's text"]
        except KeyError as error:
            raise RuntimeError("device 0 is lost") from error
    except RuntimeError:
        logging.getLogger(name).exception("a request failed")
    [record] = lines.records
    text = logging.Formatter().format(record)
    assert "RuntimeError: device 0 is lost" in text
    assert "KeyError (its words may quote a caller)" in text
    assert f"{__file__}:" in text
    assert "the caller's text" not in text


def test_which_errors_speak() -> None:
    """Errors about what a caller gave don't; others of ours do, and those that end in a circle end."""
    assert list(told(InputError("'x' is given twice"))) == ["InputError (its words may quote a caller)"]
    assert list(told(NumericalError("NaN in the rows"))) == ["NumericalError: NaN in the rows"]
    first, second = ValueError(), OSError(5, "no disk")
    first.__cause__, second.__cause__ = second, first
    assert list(told(first)) == ["ValueError (its words may quote a caller)", "OSError: [Errno 5] no disk"]


def test_a_handler_of_another_logger_is_left_alone() -> None:
    """Joining is for our own loggers."""
    assert not any(isinstance(handler, JoinedToServe) for handler in logging.getLogger().handlers)
