"""Each step as one call: a model's folder in, a fresh folder with model, tokenizer and manifest out."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from tokenalign.backbone import resolve_device
from tokenalign.compression.bpe import ByteLevelBpe
from tokenalign.compression.counting import Counts, count_model
from tokenalign.compression.distillation import (
    Options,
    Record,
    Run,
    distil,
    epoch_means,
    held_out_losses,
    run_fingerprint,
    trained_parameters,
)
from tokenalign.compression.embedding import keep_rows
from tokenalign.compression.layers import keep_layers
from tokenalign.compression.manifest import file_hashes, read_manifest, write_manifest
from tokenalign.compression.model_folder import (
    CONFIG_FILE,
    TextModel,
    check_fresh,
    copy_tokenizer,
    load_text_model,
    save_text_model,
)
from tokenalign.compression.texts import hold_out, read_unlabelled, token_sequences
from tokenalign.compression.token_growth import Growth, token_growth
from tokenalign.compression.tokenizer_cut import cut_tokenizer, write_tokenizer
from tokenalign.compression.vocabulary_rule import Kept, Rule, apply_rule
from tokenalign.errors import CompressionError
from tokenalign.references import sha256_of
from tokenalign.text import TOKENIZER_FILE
from tokenalign.training.checkpoint import CHECKPOINT_FILE

HISTORY_FILE = "losses.jsonl"
SOURCE_IDS_FILE = "source_token_ids.json"


@dataclass(frozen=True, slots=True)
class Source:
    """A model's folder, and what the caller named it by."""

    folder: Path
    reference: str
    revision: str | None = None

    @property
    def named(self) -> dict[str, str | None]:
        """What a manifest says of it beside its files' hashes."""
        return {"reference": self.reference, "revision": self.revision}


def counts_record(counts: Counts) -> dict[str, Any]:
    """Counts as a manifest holds them."""
    return asdict(counts) | {
        "stack_parameters": counts.stack_parameters,
        "embedding_share": round(counts.embedding_share, 6),
    }


def cut_layers(source: Source, kept: Sequence[int], output: Path, dtype: torch.dtype | None = torch.bfloat16) -> Counts:
    """Write a model of the kept layers to the fresh folder `output`; its counts.

    dtype: of the file, by default bfloat16 as on the cards; None for that of the source
    Raises `CompressionError` or `BackboneError` before anything is written.
    """
    check_fresh(output)
    read_manifest(source.folder)
    student = keep_layers(load_text_model(source.folder, dtype), kept)
    counts = count_model(student.model, student.model.dtype)
    save_text_model(output, student)
    copy_tokenizer(source.folder, output)
    facts = {"layers": list(kept), "dtype": str(student.model.dtype), "counts": counts_record(counts)}
    write_manifest(
        output,
        "layers",
        {"source": source.folder},
        facts,
        before=source.folder,
        references={"source": source.named},
    )
    return counts


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
    if resume:
        if not (output / CHECKPOINT_FILE).is_file():
            raise CompressionError(
                f"{output} has no {CHECKPOINT_FILE}, so there is nothing to resume; leave --resume out"
            )
    else:
        check_fresh(output)
    kept = _map_of(teacher.folder, student)
    train, held_out = hold_out(read_unlabelled(texts, text_column), options.held_out_share, options.seed)
    parts = [token_sequences(teacher.folder, part, options.max_length) for part in (train, held_out)]
    starting = load_text_model(student, torch.float32)
    run = Run(
        teacher=load_text_model(teacher.folder, torch.float32).model.requires_grad_(False).to(where),
        student=starting.model.to(where),
        kept=kept,
        options=options,
        train=parts[0],
        held_out=parts[1],
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
    trained = trained_parameters(run.student, freeze_embedding=options.freeze_embedding)
    facts = {
        "layers": list(kept),
        "options": asdict(options),
        "texts": {"train": len(train), "held_out": len(held_out)},
        "sequences": {"train": len(run.train), "held_out": len(run.held_out)},
        "tokens": {"train": sum(map(len, run.train)), "held_out": sum(map(len, run.held_out))},
        "trained_parameters": sum(parameter.numel() for parameter in trained),
        "losses": {"held_out_at_start": result.start, "epochs": result.epochs, "held_out_as_saved": result.saved},
        "dtype": str(dtype),
        "counts": counts_record(counts),
    }
    (output / CHECKPOINT_FILE).unlink(missing_ok=True)
    write_manifest(
        output,
        "distil",
        {"teacher": teacher.folder, "student": student, "texts": texts},
        facts,
        before=student,
        references={"teacher": teacher.named},
    )
    return result


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyCut:
    """What a cut of the vocabulary gave."""

    counts: Counts
    kept: Kept
    tokens_before: int
    growth: list[Growth]


def cut_vocabulary(source: Source, rule: Rule, output: Path, samples: Iterable[tuple[str, str]]) -> VocabularyCut:
    """Write the model with the tokens of a rule alone to the fresh folder `output`, its weights in the source's dtype.

    samples: (language, text) whose tokens are counted before and after
    Raises `CompressionError` or `BackboneError` before anything is written.
    """
    check_fresh(output)
    read_manifest(source.folder)
    tokenizer = ByteLevelBpe.read(source.folder)
    kept = apply_rule(tokenizer, rule)
    document = cut_tokenizer(tokenizer, kept)
    smaller = keep_rows(load_text_model(source.folder), kept)
    counts = count_model(smaller.model, smaller.model.dtype)
    save_text_model(output, smaller)
    write_tokenizer(source.folder, output, document, kept)
    (output / SOURCE_IDS_FILE).write_text(json.dumps(kept.source_ids) + "\n", encoding="utf-8")
    before, after = (Tokenizer.from_file(str(folder / TOKENIZER_FILE)) for folder in (source.folder, output))
    growth = token_growth(before, after, samples)
    facts = {
        "rule": asdict(rule),
        "entries": {"before": len(tokenizer.ids), "after": len(kept.source_ids), "by_reason": kept.by_reason},
        "rows": f"row i is the source's row {SOURCE_IDS_FILE}[i]",
        "token_growth": [asdict(one) | {"ratio": round(one.ratio, 3)} for one in growth],
        "dtype": str(smaller.model.dtype),
        "counts": counts_record(counts),
    }
    write_manifest(
        output,
        "vocabulary",
        {"source": source.folder},
        facts,
        before=source.folder,
        references={"source": source.named},
    )
    return VocabularyCut(counts, kept, len(tokenizer.ids), growth)


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
