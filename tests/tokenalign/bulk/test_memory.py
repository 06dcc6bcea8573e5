"""Memory: flat over a million rows, whatever the format. The model answers at once there, the files are real."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1_200)]

ROWS = 1_000_000
GROWTH_BYTES = 32 * 2**20  # allowed from 10 % to 100 % of the rows: 900,000 rows kept would take many times that
SCRIPT = """
import importlib.util, json, sys
from pathlib import Path

path, home, real = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "real"
spec = importlib.util.spec_from_file_location("instant", home / "conftest.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from tokenalign.bulk.answering import Question
from tokenalign.bulk.opening import format_of
from tokenalign.bulk.output import OutputPaths
from tokenalign.bulk.reading import Source
from tokenalign.bulk.rows import Columns
from tokenalign.bulk.run import Job, run_bulk

def load():
    if real:
        from tokenalign import TokenAlignClassifier
        return TokenAlignClassifier.from_pretrained(device="cpu")
    return module.Instant()

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

seen = []
def watch(done):
    seen.append((done.done / done.total, resident()))

job = Job(Source(path, format_of(path), Columns()), Question(module.LABELS, scores=True),
          OutputPaths.of(path.with_suffix(".out.jsonl")))
summary = run_bulk(job, load, on_progress=watch)
at = [next(size for share, size in seen if share >= part) for part in (0.1, 0.5, 1.0)]
print(json.dumps({"good": summary.good, "bad": summary.bad, "resident": at}))
"""


def make(path: Path, rows: int) -> None:
    words = "my card was charged twice for the same purchase and nobody answers"
    values = [f"{i}: {words[: i % len(words)]}" for i in range(1_000)]
    if path.suffix == ".parquet":
        schema = pa.schema([("text", pa.string())])
        with parquet.ParquetWriter(path, schema) as writer:
            for start in range(0, rows, 100_000):
                texts = [f"{start + i} {values[i % 1_000]}" for i in range(min(100_000, rows - start))]
                writer.write_table(pa.table({"text": texts}, schema))
        return
    with path.open("w") as file:
        if path.suffix == ".csv":
            file.write("text\n")
        for i in range(rows):
            text = f"{i} {values[i % 1_000]}"
            file.write(f"{text}\n" if path.suffix == ".csv" else json.dumps({"text": text}) + "\n")


def measured(path: Path, rows: int, model: str) -> list[int]:
    """Resident bytes at 10, 50 and 100 % of the rows, of a process that does nothing else."""
    make(path, rows)
    command = [sys.executable, "-c", SCRIPT, str(path), str(Path(__file__).parent), model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(path.suffix, model, rows, [round(size / 2**20) for size in found["resident"]], "MiB")
    assert (found["good"], found["bad"]) == (rows, 0)
    sizes: list[int] = found["resident"]
    return sizes


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_million_rows(tmp_path: Path, kind: str) -> None:
    """Reading, rendering and writing hold windows, not the file."""
    first, half, last = measured(tmp_path / f"in.{kind}", ROWS, "instant")
    assert max(half, last) - first < GROWTH_BYTES


def test_the_real_model(tmp_path: Path) -> None:
    """The default model over some thousand rows: memory grows while batches have new shapes, then stays."""
    _, half, last = measured(tmp_path / "in.jsonl", 24 * 1_024, "real")
    assert last - half < GROWTH_BYTES
