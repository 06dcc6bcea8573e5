"""The step that distils: a teacher, a student and a file of texts in, the student's fresh folder out."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tokenalign.backbone import resolve_device
from tokenalign.compression.counting import Counts, count_model
from tokenalign.compression.distillation import (
    Options,
    Record,
    Run,
    distil,
    epoch_means,
    held_out_losses,
    run_fingerprint,
)
from tokenalign.compression.manifest import file_hashes, read_manifest, write_manifest
from tokenalign.compression.model_folder import (
    CONFIG_FILE,
    Source,
    TextModel,
    check_fresh,
    copy_tokenizer,
    load_text_model,
    save_text_model,
)
from tokenalign.compression.texts import hold_out, read_unlabelled, token_sequences
from tokenalign.errors import CompressionError
from tokenalign.references import sha256_of
from tokenalign.text import TOKENIZER_FILE
from tokenalign.training.checkpoint import CHECKPOINT_FILE

HISTORY_FILE = "losses.jsonl"


@dataclass(frozen=True, slots=True, eq=False)
class Distilled:
    """What a distillation gave.

    epochs: mean training losses and held-out losses of each; start, saved: held-out losses before the first step, and
    of the weights as they are in the file, rounded to its dtype
    """

    counts: Counts
    epochs: list[Record]
    start: dict[str, float]
    saved: dict[str, float]


def distil_student(
    teacher: Source,
    student: Path,
    texts: Path,
    output: Path,
    options: Options,
    *,
    text_column: str = "text",
    device: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    resume: bool = False,
    on_step: Callable[[int, int, Record], None] = lambda step, steps, record: None,
) -> Distilled:
    """Write to `output` the student, a folder that `cut_layers` made of this teacher, after distillation.

    texts: a file of unlabelled texts; dtype: of the file, training is in float32; on_step: gets step, steps and losses
    Raises `CompressionError`, `TrainingError`, `DataError` or `BackboneError` saying what doesn't fit.
    """
    where = resolve_device(device)
    _check_output(output, resume=resume)
    kept = _map_of(teacher.folder, student)
    train, held_out = hold_out(read_unlabelled(texts, text_column), options.held_out_share, options.seed)
    starting = load_text_model(student, torch.float32)
    run = Run(
        teacher=load_text_model(teacher.folder, torch.float32).model.requires_grad_(False).to(where),
        student=starting.model.to(where),
        kept=kept,
        options=options,
        train=token_sequences(teacher.folder, train, options.max_length),
        held_out=token_sequences(teacher.folder, held_out, options.max_length),
        fingerprint=run_fingerprint(
            options,
            {
                "teacher": file_hashes(teacher.folder),
                "student": file_hashes(student),
                "texts": sha256_of(texts),
                "device": where.type,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            },
        ),
    )
    output.mkdir(parents=True, exist_ok=True)
    distil(run, output, on_step=lambda step, record: on_step(step, run.steps, record))

    saved = TextModel(run.student.to(dtype), starting.absent)
    save_text_model(output, saved)
    copy_tokenizer(student, output)
    lines = "".join(json.dumps(record) + "\n" for record in run.history)
    (output / HISTORY_FILE).write_text(lines, encoding="utf-8")
    counts = count_model(saved.model, dtype)
    run.student.float()
    result = Distilled(counts, epoch_means(run), run.history[0]["held_out"], held_out_losses(run))
    (output / CHECKPOINT_FILE).unlink(missing_ok=True)
    write_manifest(
        output,
        "distil",
        {"teacher": teacher.folder, "student": student, "texts": texts},
        {"texts": {"train": len(train), "held_out": len(held_out)}, "dtype": str(dtype), **_facts(run, result)},
        before=student,
        references={"teacher": teacher.named},
    )
    return result


def _check_output(output: Path, *, resume: bool) -> None:
    if not resume:
        check_fresh(output)
    elif not (output / CHECKPOINT_FILE).is_file():
        raise CompressionError(f"{output} has no {CHECKPOINT_FILE}, so there is nothing to resume; leave --resume out")


def _facts(run: Run, result: Distilled) -> dict[str, Any]:
    """What a manifest says of a run beside its sources."""
    trained = [parameter for parameter in run.student.parameters() if parameter.requires_grad]
    return {
        "layers": list(run.kept),
        "options": asdict(run.options),
        "sequences": {"train": len(run.train), "held_out": len(run.held_out)},
        "tokens": {"train": sum(map(len, run.train)), "held_out": sum(map(len, run.held_out))},
        "trained_parameters": sum(parameter.numel() for parameter in trained),
        "losses": {"held_out_at_start": result.start, "epochs": result.epochs, "held_out_as_saved": result.saved},
        "counts": result.counts.record(),
    }


def _map_of(teacher: Path, student: Path) -> tuple[int, ...]:
    """Which of the teacher's layers a student's were.

    Raises `CompressionError` unless the student's last step kept layers of this very teacher, its tokenizer unchanged.
    """
    manifest = read_manifest(student)
    step = manifest["steps"][-1] if manifest else {}
    if step.get("step") != "layers":
        raise CompressionError(
            f"{student} is not what `tokenalign compress layers` made; make the student of the teacher with that first"
        )
    read_manifest(teacher)
    before, now = step["sources"]["source"]["files"], file_hashes(teacher)
    needed = {
        name for name in before.keys() | now.keys() if name.endswith((".safetensors", CONFIG_FILE, TOKENIZER_FILE))
    }
    if other := sorted(name for name in needed if before.get(name) != now.get(name)):
        raise CompressionError(
            f"{student} was made of another model than {teacher}: {other[0]} differs; name its source"
        )
    return tuple(step["layers"])
