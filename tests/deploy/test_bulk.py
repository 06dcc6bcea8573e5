"""What a bulk actor does, without Ray: windows in, whole lines out, the same as on one machine."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy import bulk
from deploy.bulk import ActorPool, WindowActor, run_on_ray
from tokenalign import LabelSet
from tokenalign.bulk.answering import Question
from tokenalign.bulk.commands import load_classifier
from tokenalign.bulk.output import OutputPaths
from tokenalign.bulk.reading import Place, Source, file_identity
from tokenalign.bulk.rows import Columns
from tokenalign.bulk.run import Job, run_bulk
from tokenalign.errors import BulkError, InputError

MakeJob = Callable[[str], Job]


@pytest.fixture
def job(tmp_path: Path) -> MakeJob:
    """Makes a job of four windows, one row of them bad, with an output of that name."""
    path = tmp_path / "in.csv"
    path.write_text("text\n" + "".join(f"card was charged {i} times\n" for i in range(30)) + '"\n')

    def make(name: str) -> Job:
        labels = LabelSet.of(["card payment", "cash declined"])
        return Job(Source(path, "csv", Columns(), 8), Question(labels), OutputPaths.of(tmp_path / name))

    return make


@pytest.fixture
def model(bert_head: Path) -> dict[str, Any]:
    """The options of the tiny BERT."""
    return {"id_or_path": str(bert_head), "device": "cpu", "local_files_only": True}


def in_process(order: list[int]) -> Callable[..., Iterator[dict[str, Any]]]:
    """In the place of Ray: one actor, whose answers come back in that order."""

    def answered(places: list[Place], actor: tuple[Any, ...], pool: ActorPool) -> Iterator[dict[str, Any]]:
        worker = WindowActor(*actor)
        for i in order:
            batch = worker({"rows": np.array([places[i].rows]), "offset": np.array([places[i].offset])})
            yield {key: values[0] for key, values in batch.items()}

    return answered


def test_as_on_one_machine(job: MakeJob, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are, byte for byte, those of `run_bulk`."""
    monkeypatch.setattr(bulk, "_answered", in_process([0, 1, 2, 3]))
    one, cluster = job("one.jsonl"), job("cluster.jsonl")
    assert run_bulk(one, lambda: load_classifier(model)) == run_on_ray(cluster, model, ActorPool())
    assert one.paths.output.read_bytes() == cluster.paths.output.read_bytes()
    assert one.paths.errors.read_bytes() == cluster.paths.errors.read_bytes()
    assert not cluster.paths.progress.exists()


def test_another_order_is_an_error(job: MakeJob, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a wrong file: what came in order is kept, and the same job goes on from there."""
    monkeypatch.setattr(bulk, "_answered", in_process([0, 2, 1, 3]))
    with pytest.raises(BulkError, match="rows from 16 on came where those from 8 on were due"):
        run_on_ray(job("out.jsonl"), model, ActorPool())
    monkeypatch.setattr(bulk, "_answered", in_process([0, 1, 2]))
    assert run_on_ray(job("out.jsonl"), model, ActorPool()).resumed_at == 8


def test_another_file_on_a_node(job: MakeJob, model: dict[str, Any]) -> None:
    """Is found before anything is answered."""
    made = job("out.jsonl")
    assert made.source.path is not None
    other = file_identity(made.source.path) | {"size": 1}
    with pytest.raises(BulkError, match="is another file on this node"):
        WindowActor(made.source, made.question, model, other)


def test_standard_input_is_refused(job: MakeJob, model: dict[str, Any]) -> None:
    """Other nodes can't read it."""
    made = job("out.jsonl")
    source = Source(None, "jsonl", Columns())
    with pytest.raises(InputError, match="can't be read by other nodes"):
        run_on_ray(Job(source, made.question, made.paths), model, ActorPool())
