"""Distillation of small random models: what it learns, what it leaves alone, and that it can be had again."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import save_word_piece_tokenizer
from tests.tokenalign.compression.models import THIN, qwen35_config, save_random
from tokenalign.compression.distillation import Options, Record, rate
from tokenalign.compression.distillation_step import HISTORY_FILE, Distilled, distil_student
from tokenalign.compression.layer_step import cut_layers
from tokenalign.compression.manifest import read_manifest
from tokenalign.compression.model_folder import Source, load_text_model
from tokenalign.compression.recurrent import is_recurrent_scalar
from tokenalign.compression.texts import hold_out, read_unlabelled, token_sequences
from tokenalign.errors import CompressionError, DataError, TrainingError
from tokenalign.references import sha256_of
from tokenalign.training.checkpoint import CHECKPOINT_FILE

TOPICS = ["card", "payment", "cash", "fee", "pin"]
ENDS = ["declined", "received", "charged twice", "was not received", "lost", "late"]
KEPT = (0, 3, 5)
OPTIONS = Options(epochs=4, batch_size=6, learning_rate=1e-3, held_out_share=0.2, seed=3, checkpoint_steps=3)


class GoneError(Exception):
    """As if the machine had gone."""


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3.5 of six layers with a WordPiece tokenizer."""
    folder = tmp_path_factory.mktemp("teacher")
    return save_random(qwen35_config(6, save_word_piece_tokenizer(folder), **THIN), folder)


@pytest.fixture(scope="module")
def student(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("student") / "kept"
    cut_layers(Source(teacher, "teacher"), KEPT, folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty short texts, a line each."""
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n".join(f"{topic} {end}" for topic in TOPICS for end in ENDS) + "\n\n")
    return path


@pytest.fixture(scope="module")
def distilled(
    teacher: Path, student: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Distilled]:
    folder = tmp_path_factory.mktemp("distilled") / "model"
    return folder, run(teacher, student, texts, folder)


def run(teacher: Path, student: Path, texts: Path, output: Path, options: Options = OPTIONS, **more: Any) -> Distilled:
    return distil_student(Source(teacher, "teacher"), student, texts, output, options, device="cpu", **more)


def test_losses_fall(distilled: tuple[Path, Distilled]) -> None:
    """On texts that were not trained on, between layers and at the end; also as the file has them, rounded."""
    found = distilled[1]
    last = found.epochs[-1]["held_out"]
    for name in ("total", "interface", "final"):
        assert last[name] < 0.9 * found.start[name], name
        assert found.saved[name] == pytest.approx(last[name], rel=0.05)
    assert last["total"] == pytest.approx(0.2 * last["interface"] + 0.8 * last["final"])


def test_recurrent_scalars_stay(teacher: Path, student: Path, texts: Path, tmp_path: Path) -> None:
    """A_log and dt_bias are the teacher's, bit for bit; everything else that a text passes through has moved."""
    run(teacher, student, texts, tmp_path / "model", replace(OPTIONS, epochs=1), dtype=torch.float32)
    folders = (student, tmp_path / "model")
    before, after = (load_text_model(folder, torch.float32).model.state_dict() for folder in folders)
    scalars = {name for name in before if is_recurrent_scalar(name)}
    assert sum(before[name].numel() for name in scalars) == 8
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == (name in scalars), name


def test_unseen_rows_stay(distilled: tuple[Path, Distilled], student: Path, texts: Path) -> None:
    """The embedding of a token that no text holds is the teacher's still."""
    before, after = (load_text_model(folder).model.embed_tokens.weight for folder in (student, distilled[0]))
    seen = {i for ids in token_sequences(student, read_unlabelled(texts)) for i in ids} | {0}  # 0 fills up
    unseen = [i for i in range(len(before)) if i not in seen]
    assert len(unseen) > 5
    assert torch.equal(before[unseen], after[unseen])


def test_the_table_can_stay(teacher: Path, student: Path, texts: Path, tmp_path: Path) -> None:
    """--freeze-embedding."""
    run(teacher, student, texts, tmp_path / "model", replace(OPTIONS, epochs=1, freeze_embedding=True))
    before, after = (load_text_model(folder).model.embed_tokens.weight for folder in (student, tmp_path / "model"))
    assert torch.equal(before, after)


def test_the_same_again(
    teacher: Path, student: Path, texts: Path, distilled: tuple[Path, Distilled], tmp_path: Path
) -> None:
    """The same options give the same file, byte for byte, another seed another one."""
    run(teacher, student, texts, tmp_path / "again")
    run(teacher, student, texts, tmp_path / "other", replace(OPTIONS, seed=4))
    digests = [sha256_of(f / "model.safetensors") for f in (distilled[0], tmp_path / "again", tmp_path / "other")]
    assert digests[0] == digests[1] != digests[2]


def test_an_interrupted_run_goes_on(
    teacher: Path, student: Path, texts: Path, distilled: tuple[Path, Distilled], tmp_path: Path
) -> None:
    """Resumed, it ends with the very file and losses of the run that was left alone."""

    def stop(step: int, steps: int, record: Record) -> None:
        if step == 8:
            raise GoneError

    with pytest.raises(GoneError):
        run(teacher, student, texts, tmp_path / "model", on_step=stop)
    with pytest.raises(CompressionError, match="fresh --output"):
        run(teacher, student, texts, tmp_path / "model")
    with pytest.raises(TrainingError, match="another run"):
        run(teacher, student, texts, tmp_path / "model", replace(OPTIONS, seed=9), resume=True)
    steps: list[int] = []
    run(teacher, student, texts, tmp_path / "model", resume=True, on_step=lambda step, *_: steps.append(step))
    assert steps[0] == 7
    for name in ("model.safetensors", HISTORY_FILE):
        assert sha256_of(tmp_path / "model" / name) == sha256_of(distilled[0] / name), name
    assert not (tmp_path / "model" / CHECKPOINT_FILE).exists()


def test_nothing_to_resume(teacher: Path, student: Path, texts: Path, tmp_path: Path) -> None:
    """Resuming needs a checkpoint."""
    with pytest.raises(CompressionError, match="nothing to resume"):
        run(teacher, student, texts, tmp_path / "model", resume=True)


def test_history(distilled: tuple[Path, Distilled]) -> None:
    """A line for each step with its losses and learning rate; held-out losses before the first and after each epoch."""
    records = [json.loads(line) for line in (distilled[0] / HISTORY_FILE).read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(17))
    assert [record["step"] for record in records if "held_out" in record] == [0, 4, 8, 12, 16]
    assert all(record.keys() >= {"learning_rate", "total", "final", "interface"} for record in records[1:])


def test_manifest(teacher: Path, student: Path, texts: Path, distilled: tuple[Path, Distilled]) -> None:
    """Both steps, the teacher's files, the texts, options and losses, and the hash of every file that came out."""
    manifest = read_manifest(distilled[0])
    assert manifest is not None
    first, second = manifest["steps"]
    assert (first["step"], second["step"], second["layers"]) == ("layers", "distil", list(KEPT))
    sources = second["sources"]
    assert sources["teacher"]["files"]["model.safetensors"] == sha256_of(teacher / "model.safetensors")
    assert sources["texts"]["files"] == {"texts.txt": sha256_of(texts)}
    assert second["texts"] == {"train": 24, "held_out": 6}
    assert second["losses"]["held_out_as_saved"] == distilled[1].saved
    assert {"model.safetensors", "config.json", "tokenizer.json", HISTORY_FILE} <= manifest["files"].keys()
    whole = sum(p.numel() for p in load_text_model(student).model.parameters())
    assert second["trained_parameters"] == whole - 8


def test_a_student_of_another_teacher(teacher: Path, student: Path, texts: Path, tmp_path: Path) -> None:
    """Its map would be of other layers."""
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    save_random(load_text_model(teacher).model.config, other, seed=8)
    with pytest.raises(CompressionError, match="was made of another model"):
        run(other, student, texts, tmp_path / "model")
    with pytest.raises(CompressionError, match="compress layers"):
        run(teacher, teacher, texts, tmp_path / "model")


def test_a_loss_that_is_no_number_ends_it(teacher: Path, student: Path, texts: Path, tmp_path: Path) -> None:
    """A learning rate far too high is told, with the step."""
    with pytest.raises(CompressionError, match="lower the learning rate"):
        run(teacher, student, texts, tmp_path / "model", replace(OPTIONS, learning_rate=1e30))


@pytest.mark.parametrize(
    "values", [{"epochs": 0}, {"learning_rate": 0.0}, {"interface_weight": 1.5}, {"held_out_share": 1.0}]
)
def test_options_out_of_bounds(values: dict[str, Any]) -> None:
    """The error names the option and its value."""
    ((name, value),) = values.items()
    with pytest.raises(CompressionError, match=f"{name} must be .*{value}"):
        Options(**values)


def test_rate() -> None:
    """It rises to 1 over the first tenth, then falls, and is above 0 at every step."""
    rates = [rate(step, 100) for step in range(1, 101)]
    assert rates[9] == 1
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert min(rates) > 0


def test_texts_of_other_files(tmp_path: Path) -> None:
    """JSON Lines by a column; blank lines of a .txt are none; no texts, or bytes that aren't UTF-8, are an error."""
    rows, lines, empty, latin = (tmp_path / name for name in ("a.jsonl", "b.txt", "c.txt", "d.txt"))
    rows.write_text('{"words": "one"}\n{"words": "two"}\n')
    lines.write_text("one\n\n  two \n")
    empty.write_text("\n")
    latin.write_bytes("é".encode("latin-1"))
    assert read_unlabelled(rows, "words") == read_unlabelled(lines) == ("one", "two")
    with pytest.raises(DataError, match="no texts"):
        read_unlabelled(empty)
    with pytest.raises(DataError, match="not UTF-8"):
        read_unlabelled(latin)
    with pytest.raises(DataError, match="can't be read"):
        read_unlabelled(tmp_path / "absent.txt")


def test_held_out_texts_are_not_trained_on() -> None:
    """A text that occurs twice is on one side only; one alone leaves nothing to train on."""
    train, held_out = hold_out(["a", "b", "a", "c", "d"], 0.3, seed=1)
    assert len(held_out) == 1
    assert sorted([*train, *held_out]) == ["a", "b", "c", "d"]
    with pytest.raises(DataError, match="more texts"):
        hold_out(["a", "a"], 0.5, seed=1)


def test_long_texts_are_read_to_the_end(teacher: Path) -> None:
    """In several sequences, each with the tokenizer's special tokens around it."""
    whole = token_sequences(teacher, ["card payment cash"], 16)[0]
    parts = token_sequences(teacher, ["card payment cash"], 4)
    assert [ids[0] for ids in parts] == [whole[0]] * len(parts)
    assert [i for ids in parts for i in ids[1:-1]] == whole[1:-1]
    assert max(map(len, parts)) == 4
