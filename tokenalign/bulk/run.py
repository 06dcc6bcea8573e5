"""A bulk run on one machine: reading, the model, and writing at the same time, each a window apart."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tokenalign.bulk.ahead import ahead
from tokenalign.bulk.answering import Answered, Classifier, Question, answer, render
from tokenalign.bulk.opening import open_reader
from tokenalign.bulk.output import Output, OutputPaths, digest_of
from tokenalign.bulk.progress import Done
from tokenalign.bulk.reading import Place, Reader, Source, file_identity
from tokenalign.errors import InputError
from tokenalign.results import Warning_

WINDOWS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Job:
    """What a bulk run does: read `source`, ask `question` of each row, write to `paths`."""

    source: Source
    question: Question
    paths: OutputPaths
    overwrite: bool = False

    def open(self) -> tuple[Reader, Output]:
        """The input, and the output at the place to begin at; nothing is read or written yet.

        Raises `InputError`, `DataError` or `BulkError` where a path, a column or an unfinished run doesn't fit.
        """
        self._check_paths()
        reader = open_reader(self.source)
        return reader, Output(
            self.paths, self._identity(), overwrite=self.overwrite, resumable=self.source.path is not None
        )

    def _identity(self) -> dict[str, object]:
        """What must not change between the parts of a run."""
        question = self.question
        labels = [[label.name, list(label.descriptions)] for label in question.labels.labels]
        return {
            "input": None if self.source.path is None else file_identity(self.source.path),
            "format": self.source.format,
            "columns": [self.source.columns.text, self.source.columns.id],
            "labels": digest_of(labels),
            "explain": question.explain,
            "scores": [question.scores, question.top_k],
            "window": self.source.window_rows,
            "errors file": self.paths.errors.name,
        }

    def _check_paths(self) -> None:
        written = {"output": self.paths.output, "errors": self.paths.errors, "progress": self.paths.progress}
        for what, path in written.items():
            if not path.parent.is_dir():
                raise InputError(f"folder {path.parent} does not exist; make it, or write elsewhere", (what,))
        named = {"input": self.source.path, **written}
        seen: dict[Path, str] = {}
        for what, given in named.items():
            if given is not None and (other := seen.setdefault(_real(given), what)) != what:
                raise InputError(f"{given} is the {other} too; write elsewhere", (what,))
        source = self.source.path
        if source is not None and source.exists():
            for what, path in written.items():
                if path.exists() and path.samefile(source):
                    raise InputError(f"{path} is the input under another name; write elsewhere", (what,))


@dataclass(frozen=True, slots=True)
class Summary:
    """Rows with an answer and bad ones, and how many of both an earlier part of the run had done."""

    good: int
    bad: int
    resumed_at: int


def run_bulk(
    job: Job,
    load: Callable[[], Classifier],
    *,
    on_progress: Callable[[Done], None] = lambda done: None,
    on_warnings: Callable[[list[Warning_]], None] = lambda warnings: None,
) -> Summary:
    """What was done, when all rows are answered or in the side file.

    load: gives the classifier; called after everything else was checked
    on_progress: called at the start and after each window is on disk, from a thread of the run
    on_warnings: what there is to say of the labels, once
    Raises `InputError`, `DataError` or `BulkError`; what was done by then is kept, and the same job goes on from there.
    """
    reader, output = job.open()
    with output:
        classifier = load()
        output.bind_model(classifier.fingerprint)
        begun = output.place

        def write(answered: Answered, end: Place) -> None:
            output.commit(render(answered, job.question), end)
            on_progress(_done(reader, output))

        on_progress(_done(reader, output))
        warned = False
        written: Future[None] | None = None
        with (
            closing(ahead(reader.windows(begun), WINDOWS_AHEAD)) as windows,
            ThreadPoolExecutor(1, "writing") as writing,
        ):
            for window in windows:
                answered = answer(classifier, window, job.question)
                if answered.good and not warned:
                    on_warnings(answered.good[0][1]["warnings"])
                    warned = True
                if written is not None:
                    written.result()
                written = writing.submit(write, answered, window.end)
            if written is not None:
                written.result()
        output.finish()
        return Summary(output.good, output.bad, begun.rows)


def _done(reader: Reader, output: Output) -> Done:
    return Done(output.good + output.bad, output.bad, output.place.offset, reader.total)


def _real(path: Path) -> Path:
    return path.resolve()
