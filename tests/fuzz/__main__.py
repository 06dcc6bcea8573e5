"""Coverage-guided fuzzing of the label cache's decoder: `make fuzz`, or `python -m tests.fuzz [options of libFuzzer]`.

Ends with 0 when its time is over; else what made the decoder fail is in a file beside the corpus, in build/fuzz.
"""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["deploy.label_cache.codec"]):
    from tests.fuzz.entries import check_bytes, seeds

FOLDER = Path("build") / "fuzz"
CORPUS = FOLDER / "corpus"


if __name__ == "__main__":
    CORPUS.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(seeds()):
        (CORPUS / f"seed-{i}").write_bytes(seed)
    atheris.Setup([sys.argv[0], f"-artifact_prefix={FOLDER}/", *sys.argv[1:], str(CORPUS)], check_bytes)
    atheris.Fuzz()
