"""Measures everything that the performance report says, and writes the report.

    python -m tests.benchmarks [--only service,latency] [--repeats 3] [--quick] [--output docs/benchmarks]

With --only, the other parts of the report in the output folder stay as they were, each with its own date and commit.
"""

import argparse
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tests.benchmarks import label_counts, latency, library_flops, overload, peers, quality, qwen3, throughput
from tests.benchmarks.bench import PEERS_PYTHON, SHIPPED, Bench, Options, say
from tests.benchmarks.children import ROOT
from tests.benchmarks.machine import Machine
from tests.benchmarks.report import NAME, Measured, all_targets, from_json, write
from tests.benchmarks.reporting import target_table

# In the order in which they run: those that share one running service come together.
PARTS: dict[str, ModuleType] = {
    "service": throughput,
    "labels": label_counts,
    "quality": quality,
    "overload": overload,
    "latency": latency,
    "flops": library_flops,
    "peers": peers,
    "qwen3": qwen3,
}
COMMITTED, DRAFTS = ROOT / "docs" / "benchmarks", ROOT / ".cache" / "benchmarks"


def main() -> int:
    """The exit status: 1 when a part failed; a target that is missed is no failure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=_parts, default=list(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--skip", type=_parts, default=[], help="parts that are not measured")
    parser.add_argument("--repeats", type=int, help="of everything whose median counts (3)")
    parser.add_argument("--quick", action="store_true", help="only see that it works; writes to .cache/benchmarks")
    parser.add_argument("--front", choices=("shipped", "haproxy", "python"), default="shipped", help="the proxy")
    parser.add_argument("--dtype", default=SHIPPED, help="of the encoder, in the service and the library")
    parser.add_argument("--peers-python", type=Path, default=PEERS_PYTHON, help="an interpreter that has the peers")
    parser.add_argument("--output", type=Path, help="folder of the report")
    options = parser.parse_args()
    chosen = {"front": options.front, "dtype": options.dtype, "peers_python": options.peers_python}
    if options.repeats:
        chosen["repeats"] = options.repeats
    folder = options.output or (DRAFTS if options.quick else COMMITTED)
    names = [name for name in PARTS if name in options.only and name not in options.skip]
    earlier, found = {}, {}
    if len(names) < len(PARTS) and (folder / f"{NAME}.json").exists():
        earlier = from_json((folder / f"{NAME}.json").read_text(encoding="utf-8"), PARTS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended then too
    for name, part in measure(Options.quick(**chosen) if options.quick else Options(**chosen), names):
        found[name] = part
        known = {**earlier, **found}
        write(folder, {each: known[each] for each in PARTS if each in known}, PARTS, "make bench")
    print(target_table(all_targets(found, PARTS)))
    say(f"the report is {folder / NAME}.md")
    return 1 if any(part.failure for part in found.values()) else 0


def measure(options: Options, names: list[str]) -> Iterator[tuple[str, Measured]]:
    """Every named part as soon as it is measured; one that fails says so, and the others are measured all the same."""
    with Bench(options) as bench:
        for name in names:
            say(f"part {name}")
            started, result, failure = time.monotonic(), None, ""
            try:
                result = PARTS[name].measure(bench)
            except Exception as error:  # noqa: BLE001  whatever it was, the report says so
                traceback.print_exc()
                failure = f"{type(error).__name__}: {error}"
                bench.stop_service()
            seconds = time.monotonic() - started
            command = " ".join(sys.argv[1:])
            yield name, Measured(Machine.here(), seconds, command, bench.corpus.source, result, failure)


def _parts(words: str) -> list[str]:
    names = words.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(unknown)}; there is {', '.join(PARTS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
