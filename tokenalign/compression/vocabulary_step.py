"""The step that cuts the vocabulary: a folder and a rule in, a fresh folder out."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from tokenalign.compression.bpe import ByteLevelBpe
from tokenalign.compression.counting import Counts, count_model
from tokenalign.compression.embedding import keep_rows
from tokenalign.compression.manifest import read_manifest, write_manifest
from tokenalign.compression.model_folder import Source, check_fresh, load_text_model, save_text_model
from tokenalign.compression.token_growth import Growth, token_growth
from tokenalign.compression.tokenizer_cut import cut_tokenizer, write_tokenizer
from tokenalign.compression.vocabulary_rule import Kept, Rule, apply_rule
from tokenalign.text import TOKENIZER_FILE

SOURCE_IDS_FILE = "source_token_ids.json"


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
        "counts": counts.record(),
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
