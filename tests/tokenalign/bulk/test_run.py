"""Runs: order, bad rows aside, and stops of every kind from which the same job goes on."""

import io
import json
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tokenalign.bulk import output as output_module
from tokenalign.bulk.ahead import ahead
from tokenalign.bulk.answering import Lines
from tokenalign.bulk.output import Output, OutputPaths
from tokenalign.bulk.progress import BarReporter, Done, LineReporter, duration, reporter
from tokenalign.bulk.reading import Place
from tokenalign.bulk.run import Job, Summary, run_bulk
from tokenalign.errors import BulkError, InputError

MakeJob = Callable[..., Job]
LinesOf = Callable[[str], list[Any]]
ROWS = 50
HOSTILE = [b"{", b'{"text": ""}', b'{"text": "\\u200b", "id": 0}', b'{"text": 7}', b"\xff", b'{"text": "a\\ud800"}']


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A file of good and bad rows."""
    rng = random.Random(5)
    lines = [
        json.dumps({"text": f"text {i}", "id": i}).encode() if rng.random() < 0.8 else rng.choice(HOSTILE)
        for i in range(ROWS)
    ]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(lines))
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith("out")}


def test_every_row_is_answered_or_set_aside(job: MakeJob, mixed: Path, instant: Any, lines_of: LinesOf) -> None:
    """Both files are in the order of the input, and together hold each row once; nothing else is left behind."""
    summary = run_bulk(job(mixed, id_column="id"), lambda: instant)
    good, bad = lines_of("out.jsonl"), lines_of("out.errors.jsonl")
    assert summary == Summary(len(good), len(bad), 0)
    numbers = [line["row"] for line in good]
    assert numbers == sorted(numbers)
    assert [line["row"] for line in bad] == sorted(set(range(ROWS)) - set(numbers))
    assert all(
        set(line) == {"row", "id", "label", "score", "truncation"} and line["id"] == line["row"] for line in good
    )
    assert all(set(line) == {"row", "reason", "raw"} for line in bad)
    assert "the text has no character that the tokenizer can read; send some visible text" in {b["reason"] for b in bad}
    assert set(files(mixed.parent)) == {"out.jsonl", "out.errors.jsonl"}


def test_scores_where_asked_for(job: MakeJob, mixed: Path, instant: Any, lines_of: LinesOf) -> None:
    """All of them, or the best."""
    run_bulk(job(mixed, scores=True), lambda: instant)
    assert {tuple(line["scores"]) for line in lines_of("out.jsonl")} == {("card", "cash")}
    run_bulk(job(mixed, scores=True, top_k=1, overwrite=True), lambda: instant)
    assert {tuple(line["scores"]) for line in lines_of("out.jsonl")} == {("card",)}


def test_an_empty_file(job: MakeJob, tmp_path: Path, instant: Any) -> None:
    """Gives an empty file, without a side file."""
    (tmp_path / "in.jsonl").touch()
    assert run_bulk(job(tmp_path / "in.jsonl"), lambda: instant) == Summary(0, 0, 0)
    assert files(tmp_path) == {"out.jsonl": b""}


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), RuntimeError("no memory")])
@pytest.mark.parametrize("window", [0, 1, 3, 6])
def test_a_stopped_run_goes_on(job: MakeJob, mixed: Path, instant: Any, stop: BaseException, window: int) -> None:
    """Whatever the model died of: the same job answers the other rows only, and the files are those of one run."""
    run_bulk(job(mixed), lambda: instant)
    whole = files(mixed.parent)
    calls = len(instant.calls)
    instant.calls.clear()
    instant.fails_at = lambda texts: stop if len(instant.calls) == window else None
    with pytest.raises(type(stop)):
        run_bulk(job(mixed, overwrite=True), lambda: instant)
    instant.fails_at = lambda texts: None
    summary = run_bulk(job(mixed), lambda: instant)
    assert summary.resumed_at == window * 8
    assert len(instant.calls) == calls
    assert files(mixed.parent) == whole


@pytest.mark.parametrize("junk", [b"", b'{"row": 9', b"\x00" * 4_096, b'{"row": 9}\n{"ro'])
def test_what_a_killed_run_left_behind_is_cut(job: MakeJob, mixed: Path, instant: Any, junk: bytes) -> None:
    """Half a line, or lines that the progress file does not know of: they are written again, once."""
    run_bulk(job(mixed), lambda: instant)
    whole = files(mixed.parent)
    instant.calls.clear()
    instant.fails_at = lambda texts: KeyboardInterrupt() if len(instant.calls) == 3 else None
    with pytest.raises(KeyboardInterrupt):
        run_bulk(job(mixed, overwrite=True), lambda: instant)
    for name in ("out.jsonl", "out.errors.jsonl"):
        with (mixed.parent / name).open("ab") as file:
            file.write(junk)
    instant.fails_at = lambda texts: None
    run_bulk(job(mixed), lambda: instant)
    assert files(mixed.parent) == whole


def test_a_full_disk(job: MakeJob, mixed: Path, instant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says so, whole lines stay, and with room again the same job ends the file."""
    run_bulk(job(mixed), lambda: instant)
    whole = files(mixed.parent)
    append, appended = output_module._append, []

    def full(path: Path, file: Any, data: bytes) -> None:
        appended.append(data)
        if len(appended) > 5:
            file.write(data[: len(data) // 2])
            raise output_module._cant_write(path, OSError(28, "No space left on device"))
        append(path, file, data)

    monkeypatch.setattr(output_module, "_append", full)
    with pytest.raises(BulkError, match="No space left on device; what is done is kept"):
        run_bulk(job(mixed, overwrite=True), lambda: instant)
    assert (mixed.parent / "out.jsonl").read_bytes().endswith(b"\n")
    monkeypatch.setattr(output_module, "_append", append)
    assert run_bulk(job(mixed), lambda: instant).resumed_at > 0
    assert files(mixed.parent) == whole


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no /dev/full")
def test_a_write_that_fails_is_told() -> None:
    """By the file's name and the system's words."""
    with io.FileIO("/dev/full", "w") as file, pytest.raises(BulkError, match="out can't be written: No space left"):
        output_module._append(Path("out"), file, b"x")


class TestGoingOn:
    @pytest.fixture
    def stopped(self, job: MakeJob, mixed: Path, instant: Any) -> Path:
        """The input of a run that was stopped after two windows."""
        instant.fails_at = lambda texts: KeyboardInterrupt() if len(instant.calls) == 2 else None
        with pytest.raises(KeyboardInterrupt):
            run_bulk(job(mixed), lambda: instant)
        instant.fails_at = lambda texts: None
        return mixed

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"scores": True}, "had another scores"),
            ({"explain": True}, "had another explain"),
            ({"id_column": "id"}, "had another columns"),
            ({"window_rows": 9}, "had another window"),
        ],
    )
    def test_other_options_are_refused(
        self, job: MakeJob, stopped: Path, instant: Any, change: dict[str, Any], words: str
    ) -> None:
        """What differs is named, and nothing is touched."""
        before = files(stopped.parent)
        with pytest.raises(BulkError, match=f"{words}.*--overwrite"):
            run_bulk(job(stopped, **change), lambda: instant)
        assert files(stopped.parent) == before

    def test_another_input_is_refused(self, job: MakeJob, stopped: Path, instant: Any) -> None:
        """Rows added to the file make it another one."""
        stopped.write_bytes(stopped.read_bytes() + b'\n{"text": "more"}')
        with pytest.raises(BulkError, match="had another input"):
            run_bulk(job(stopped), lambda: instant)

    def test_another_model_is_refused(self, job: MakeJob, stopped: Path, instant: Any) -> None:
        """One file never holds the answers of two models."""
        instant.fingerprint = "e" * 64
        with pytest.raises(BulkError, match=r"first 16 rows were answered by model ffffffffffff, this one is eeee"):
            run_bulk(job(stopped), lambda: instant)

    def test_a_shortened_output_is_refused(self, job: MakeJob, stopped: Path, instant: Any) -> None:
        """What the progress file counts on must be there."""
        os.truncate(stopped.parent / "out.jsonl", 10)
        with pytest.raises(BulkError, match=r"is shorter than .* says"):
            run_bulk(job(stopped), lambda: instant)

    @pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"version": 2}', b"\xff"])
    def test_a_damaged_progress_file_is_refused(
        self, job: MakeJob, stopped: Path, instant: Any, content: bytes
    ) -> None:
        """It is not guessed what it said."""
        (stopped.parent / "out.jsonl.progress.json").write_bytes(content)
        with pytest.raises(BulkError, match="--overwrite to start anew"):
            run_bulk(job(stopped), lambda: instant)

    def test_a_run_without_an_answer_binds_nobody(self, job: MakeJob, mixed: Path, instant: Any) -> None:
        """One that failed before its first window, for a mistyped model say, may be repeated with other options."""

        def load() -> Any:
            raise BulkError("no such model")

        with pytest.raises(BulkError, match="no such model"):
            run_bulk(job(mixed), load)
        assert run_bulk(job(mixed, scores=True), lambda: instant).resumed_at == 0

    def test_overwrite_starts_anew(self, job: MakeJob, stopped: Path, instant: Any) -> None:
        """Whatever stood there."""
        assert run_bulk(job(stopped, scores=True, overwrite=True), lambda: instant).resumed_at == 0


def test_a_finished_output_is_not_replaced(job: MakeJob, mixed: Path, instant: Any) -> None:
    """Unless asked for."""
    run_bulk(job(mixed), lambda: instant)
    before = files(mixed.parent)
    with pytest.raises(BulkError, match=r"out.jsonl is there already.*--overwrite"):
        run_bulk(job(mixed), lambda: instant)
    assert files(mixed.parent) == before
    run_bulk(job(mixed, overwrite=True), lambda: instant)
    assert files(mixed.parent) == before


def test_two_runs_on_one_output(job: MakeJob, mixed: Path, instant: Any) -> None:
    """The second is told that the first is at work."""
    _, output = job(mixed).open()
    with output, pytest.raises(BulkError, match="another run is writing"):
        job(mixed).open()


def test_paths_that_would_destroy_the_input(job: MakeJob, mixed: Path) -> None:
    """Are refused, a link of another name too, and --overwrite doesn't help."""
    given = job(mixed, overwrite=True)
    before = mixed.read_bytes()
    os.link(mixed, mixed.parent / "link.jsonl")
    for paths in (
        OutputPaths.of(mixed),
        OutputPaths.of(mixed.parent / "link.jsonl"),
        OutputPaths.of(mixed.parent / "x.jsonl", mixed),
        OutputPaths.of(mixed.parent / "x.jsonl", mixed.parent / "x.jsonl"),
    ):
        with pytest.raises(InputError, match="write elsewhere"):
            Job(given.source, given.question, paths, overwrite=True).open()
    with pytest.raises(InputError, match="does not exist; make it"):
        Job(given.source, given.question, OutputPaths.of(mixed.parent / "no" / "x.jsonl")).open()
    with pytest.raises(BulkError, match="is no regular file"):
        Job(given.source, given.question, OutputPaths(Path("/dev/null"), mixed.parent / "e")).open()
    assert mixed.read_bytes() == before


def test_a_run_that_is_not_resumable(tmp_path: Path) -> None:
    """Leaves no progress file, and does not go on."""
    paths = OutputPaths.of(tmp_path / "out.jsonl")
    with Output(paths, {}, resumable=False) as output:
        output.commit(Lines(b"a\n", b"", 1, 0), Place(1, 1))
        assert not paths.progress.exists()
    with pytest.raises(BulkError, match="is there already"):
        Output(paths, {}, resumable=False)


def test_labels_warnings_are_told_once(job: MakeJob, mixed: Path, instant: Any) -> None:
    """They concern the labels, so one row's are everybody's."""
    told: list[Any] = []
    run_bulk(job(mixed), lambda: instant, on_warnings=told.append)
    assert told == [[]]


def test_progress_counts_what_is_on_disk(job: MakeJob, mixed: Path, instant: Any) -> None:
    """First the beginning, then each window; the last one is the whole file."""
    told: list[Done] = []
    run_bulk(job(mixed), lambda: instant, on_progress=told.append)
    assert told[0] == Done(0, 0, 0, mixed.stat().st_size)
    assert [done.rows for done in told] == [0, 8, 16, 24, 32, 40, 48, 50]
    assert told[-1].done == told[-1].total


class TestAhead:
    def test_order_and_errors(self) -> None:
        """Items come as they were made, and an error where it arose."""

        def items() -> Iterator[int]:
            yield from range(5)
            raise ValueError("broken")

        made: list[int] = []
        with pytest.raises(ValueError, match="broken"):
            made.extend(ahead(items(), 2))
        assert made == list(range(5))

    def test_bounded(self) -> None:
        """No more is made ahead than asked for, and the thread ends when the consumer leaves."""
        made: list[int] = []
        left = threading.Event()

        def items() -> Iterator[int]:
            try:
                for i in range(1_000):
                    made.append(i)
                    yield i
            finally:
                left.set()

        stream = ahead(items(), 2)
        assert next(stream) == 0
        stream.close()
        assert left.wait(30)
        assert len(made) <= 6


class TestReporters:
    def test_lines(self) -> None:
        """One every ten seconds, with rate and time left of this run, not of the part before it."""
        now = 0.0
        stream = io.StringIO()
        tell = LineReporter(stream, lambda: now)
        for second, rows in ((0, 1_000), (5, 1_500), (10, 2_000), (12, 2_200), (20, 3_000)):
            now = second
            tell(Done(rows, 3, rows, 10_000))
        assert stream.getvalue().splitlines() == [
            "2,000 rows (3 bad), 100 rows/s, about 1 min left",
            "3,000 rows (3 bad), 100 rows/s, about 1 min left",
        ]

    def test_unknown_end(self) -> None:
        """Without a total no time left is made up."""
        now = 0.0
        stream = io.StringIO()
        tell = LineReporter(stream, lambda: now)
        tell(Done(0, 0, 0, None))
        now = 10.0
        tell(Done(50, 0, 50, None))
        assert stream.getvalue() == "50 rows, 5 rows/s\n"

    def test_bar(self) -> None:
        """On a terminal: how much is done, rows and rate."""

        class Screen(io.StringIO):
            def isatty(self) -> bool:
                return True

        screen = Screen()
        tell = reporter(screen)
        assert isinstance(tell, BarReporter)
        with tell:
            tell(Done(0, 0, 0, 100))
            tell(Done(50, 1, 50, 100))
        assert "50 rows (1 bad)" in screen.getvalue()
        assert isinstance(reporter(io.StringIO()), LineReporter)

    @pytest.mark.parametrize(("seconds", "words"), [(40.4, "40 s"), (700, "12 min"), (12_000, "3 h 20 min")])
    def test_durations(self, seconds: float, words: str) -> None:
        """As people say them."""
        assert duration(seconds) == words


def test_rows_of_a_window_are_asked_in_one_call(job: MakeJob, tmp_path: Path, instant: Any) -> None:
    """Also when one of them can't be read: it is looked for without the model."""
    path = tmp_path / "in.jsonl"
    texts: Sequence[str] = ["a", "\u200b", "b", "\u200b", "c"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert run_bulk(job(path), lambda: instant) == Summary(3, 2, 0)
    assert instant.calls == [3]
