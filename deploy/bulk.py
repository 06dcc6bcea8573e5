"""Bulk classification on a Ray cluster: actors that hold the model answer windows of a file, one process writes.

The input is not read by Ray Data's own readers, which stop at the first broken line and guess types: what crosses the
cluster is where each window begins, and the actor reads it with the library's reader. So the file must be at the same
path on every node, and an actor that finds another file there says so.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from tokenalign.bulk.answering import Lines, Question, answer, render
from tokenalign.bulk.opening import open_reader
from tokenalign.bulk.output import Output
from tokenalign.bulk.progress import Done
from tokenalign.bulk.reading import Place, Source, file_identity
from tokenalign.bulk.run import Job, Summary
from tokenalign.errors import BulkError, InputError
from tokenalign.results import Warning_

Batch = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class ActorPool:
    """How many actors hold the model, and what each of them takes of its node."""

    min_actors: int = 1
    max_actors: int = 1
    cpus: float = 1.0
    gpus: float = 0.0


class WindowActor:
    """Holds a classifier and answers windows of one file. Plain: Ray Data makes the actor of it."""

    def __init__(self, source: Source, question: Question, model: dict[str, Any], identity: dict[str, object]) -> None:
        """Load the model; `BulkError` where this node has another file at the input's path than the driver."""
        from tokenalign.bulk.commands import load_classifier

        assert source.path is not None  # noqa: S101  run_on_ray refuses standard input
        if file_identity(source.path) != identity:
            raise BulkError(f"{source.path} is another file on this node; put the input where all nodes see the same")
        self._reader = open_reader(source)
        self._question = question
        self._classifier = load_classifier(model)

    def __call__(self, batch: Batch) -> Batch:
        """For each place in the batch: the lines of the window that begins there, and the place behind it."""
        found = [self._answer(Place(int(r), int(o))) for r, o in zip(batch["rows"], batch["offset"], strict=True)]
        return {key: _column([row[key] for row in found]) for key in found[0]}

    def _answer(self, place: Place) -> dict[str, object]:
        window = next(iter(self._reader.windows(place)))
        answered = answer(self._classifier, window, self._question)
        lines = render(answered, self._question)
        warnings = answered.good[0][1]["warnings"] if answered.good else []
        return {
            "first": place.rows,
            "rows": window.end.rows,
            "offset": window.end.offset,
            "good": lines.good,
            "bad": lines.bad,
            "good_rows": lines.good_rows,
            "bad_rows": lines.bad_rows,
            "fingerprint": self._classifier.fingerprint,
            "warnings": json.dumps(warnings),
        }


def run_on_ray(
    job: Job,
    model: dict[str, Any],
    pool: ActorPool,
    *,
    on_progress: Callable[[Done], None] = lambda done: None,
    on_warnings: Callable[[list[Warning_]], None] = lambda warnings: None,
) -> Summary:
    """What was done, when all rows are answered or in the side file; on the cluster that `ray.init` joined.

    Order, files and going on after a stop are those of `tokenalign.bulk.run.run_bulk`: windows come back in their
    order, and are written here. model: keywords of `TokenAlignClassifier.from_pretrained`, for each actor
    Raises what `run_bulk` raises, and `BulkError` where the cluster fails.
    """
    if job.source.path is None:
        raise InputError("standard input can't be read by other nodes; give the path of a file", ("input",))
    reader, output = job.open()
    with output:
        begun = output.place
        on_progress(_done(output, reader.total))
        told = False
        actor = (job.source, job.question, model, file_identity(job.source.path))
        for row in _answered([*reader.places(begun)], actor, pool):
            _check_order(output, row)
            output.bind_model(row["fingerprint"])
            lines = Lines(row["good"], row["bad"], int(row["good_rows"]), int(row["bad_rows"]))
            output.commit(lines, Place(int(row["rows"]), int(row["offset"])))
            on_progress(_done(output, reader.total))
            if row["good_rows"] and not told:
                on_warnings(json.loads(row["warnings"]))
                told = True
        output.finish()
        return Summary(output.good, output.bad, begun.rows)


def _answered(places: list[Place], actor: tuple[Any, ...], pool: ActorPool) -> Iterator[dict[str, Any]]:
    """The actors' rows, in the order of the places."""
    if not places:
        return
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    items = [{"rows": place.rows, "offset": place.offset} for place in places]
    blocks = min(len(items), 10_000)
    windows = ray.data.from_items(items, override_num_blocks=blocks).map_batches(
        WindowActor,
        fn_constructor_args=actor,
        batch_size=1,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(min_size=pool.min_actors, max_size=pool.max_actors),
        num_cpus=pool.cpus,
        num_gpus=pool.gpus,
    )
    try:
        yield from windows.iter_rows()
    except ray.exceptions.RayError as error:
        raise BulkError(f"the cluster could not go on: {_last_line(error)}; what is done is kept") from error


def _check_order(output: Output, row: dict[str, Any]) -> None:
    if row["first"] != output.place.rows:
        raise BulkError(
            f"rows from {row['first']:,} on came where those from {output.place.rows:,} on were due; "
            "what is done is kept: run the same command again"
        )


def _column(values: list[object]) -> NDArray[Any]:
    """Of objects where numpy would otherwise pad, or drop zero bytes at an end."""
    if isinstance(values[0], int):
        return np.array(values, dtype=np.int64)
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _done(output: Output, total: int | None) -> Done:
    return Done(output.good + output.bad, output.bad, output.place.offset, total)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
