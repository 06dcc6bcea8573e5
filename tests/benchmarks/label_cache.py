"""What the label cache saves, and what it costs: times, bytes and commands, in one run on one machine.

    python tests/benchmarks/label_cache.py [--repeats 5] [--variations 10000] [--output docs/benchmarks]

Three questions, each against a real Valkey server on a unix socket:

1. A replica that has just started gets a list that others know: how long from the shared cache, how long by encoding it
   with the shipped default model?
2. How many bytes does a label take in the server, and how many commands and round trips does a request send?
3. Many variations of a long list, each asked for once: how much of the server, and of the replica, do they fill?

With --output the report is written there as label-cache.md, label-cache.json and label-cache.svg.
"""

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import psutil
import redis
import torch

from deploy.label_cache import EmbeddedServer, LabelCache, LabelRows, RedisStore
from deploy.label_cache.redis_clients import ConnectionOptions
from deploy.model import ServedModel
from deploy.settings import ModelSettings
from tokenalign.scoring import Aligner

SIZES = (77, 1_024)
TARGET_RATIO = 50  # at the larger size
MAX_BATCH_TOKENS = 4_096  # as an encoder replica has it
MIB = 2**20
FINGERPRINT = "benchmark"
PATIENT = {"store_budget_s": 60.0, "write_budget_s": 60.0}  # the times are to be measured, not cut off

ACTIONS = ("report", "dispute", "cancel", "explain", "track", "change", "verify", "request")
THINGS = ("card payment", "cash withdrawal", "transfer abroad", "direct debit", "account limit", "exchange rate", "fee")
MATTERS = (
    "that failed", "that is pending", "charged twice", "in another currency", "made by someone else",
    "with a wrong amount", "after a refund", "on a business account", "from a lost phone", "for a joint account",
    "without a receipt", "during travel", "of last month", "that was declined", "with a virtual card",
    "before the due date", "for a new customer", "over the weekend", "at a shop abroad",
)  # fmt: skip

Encode = Callable[[list[str]], Awaitable[LabelRows]]


def labels_of(count: int) -> list[str]:
    """Distinct labels of three to eight words."""
    combined = (" ".join(words) for words in itertools.product(ACTIONS, THINGS, MATTERS))
    found = list(itertools.islice(combined, count))
    if len(found) < count:
        raise SystemExit(f"only {len(found)} labels can be made")
    return found


class DefaultModel:
    """The label side of the shipped default: tokenizer, encoder, head."""

    def __init__(self) -> None:
        served = ServedModel.load(ModelSettings(device="cpu"))
        self.width = served.config.width
        self._tokenizer = served.tokenizer
        self._backbone = served.load_backbone()
        self._aligner = Aligner(served.head, served.config.temperature)

    async def encode(self, descriptions: list[str]) -> LabelRows:
        """Fresh rows, as a scorer gets them from an encoder that has nothing else to do."""
        return await asyncio.to_thread(self._encode, descriptions)

    def _encode(self, descriptions: list[str]) -> LabelRows:
        tokens = self._tokenizer.labels(descriptions).tokens
        states = self._backbone.encode(tokens, max_batch_tokens=MAX_BATCH_TOKENS)
        queries = self._aligner.label_queries(tokens.with_values(self._aligner.project(states, "labels")))
        return LabelRows(queries.values, queries.lengths)


class StandIn:
    """Rows of the right size that cost nothing, where only bytes and counts are asked for."""

    def __init__(self, width: int, rows: int) -> None:
        self.width, self._rows = width, rows

    async def encode(self, descriptions: list[str]) -> LabelRows:
        """`rows` random unit rows for each description."""
        seed = int.from_bytes(hashlib.sha256(descriptions[0].encode()).digest()[:8], "big")
        shape = (len(descriptions) * self._rows, self.width)
        values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
        values /= np.linalg.norm(values, axis=1, keepdims=True)
        return LabelRows(values, np.full(len(descriptions), self._rows, np.int32))


async def forbidden(descriptions: list[str]) -> LabelRows:
    """Instead of an encoder, where everything must come from the cache."""
    raise SystemExit(f"{len(descriptions)} labels were encoded that the cache should have had")


def open_cache(server: EmbeddedServer | None, encode: Encode, width: int, **options: Any) -> LabelCache:
    """The cache of a replica that has just started; it is not even connected."""
    store = None if server is None else RedisStore.from_url(server.url, ConnectionOptions(read_timeout_s=60))
    return LabelCache(store, encode, width=width, fingerprint=FINGERPRINT, **{**PATIENT, **options})


async def seconds_of(cache: LabelCache, labels: Sequence[str], source: str) -> float:
    """Time of one request, which must be answered from `source`."""
    started = time.perf_counter()
    got = await cache.get(labels)
    elapsed = time.perf_counter() - started
    if got.source != source:
        raise SystemExit(f"{len(labels)} labels came from {got.source}, not from {source}")
    await cache.close()
    return elapsed


async def times(server: EmbeddedServer, model: DefaultModel, size: int, repeats: int) -> dict[str, Any]:
    """Median seconds of a replica's first request for `size` labels, by where they come from."""
    labels = labels_of(size)
    with redis.Redis.from_url(server.url, protocol=2) as admin:
        admin.flushall()
        await model.encode(labels[:32])  # what a first forward pass sets up is not the point
        encode_s = [
            await seconds_of(open_cache(None, model.encode, model.width), labels, "encoder") for _ in range(repeats)
        ]
        await fill(server, model, labels)
        list_s = [
            await seconds_of(open_cache(server, forbidden, model.width), labels, "list") for _ in range(4 * repeats)
        ]
        labels_s = []
        for _ in range(repeats):
            admin.delete(*admin.keys("*:list:*"))
            labels_s.append(await seconds_of(open_cache(server, forbidden, model.width), labels, "labels"))
    seconds = {
        "encode_s": statistics.median(encode_s),
        "labels_s": statistics.median(labels_s),
        "list_s": statistics.median(list_s),
    }
    return {
        "labels": size,
        **seconds,
        "ratio_list": seconds["encode_s"] / seconds["list_s"],
        "ratio_labels": seconds["encode_s"] / seconds["labels_s"],
        "all_s": {"encode": encode_s, "labels": labels_s, "list": list_s},
    }


async def fill(server: EmbeddedServer, model: Any, labels: Sequence[str]) -> None:
    """Leaves list and label entries of `labels` in the server."""
    for _ in range(2):
        cache = open_cache(server, model.encode, model.width)
        await cache.get(labels)
        await cache.close()


async def costs(server: EmbeddedServer, model: DefaultModel, size: int) -> dict[str, Any]:
    """Bytes in the server for `size` labels, and what requests of each kind send it."""
    labels = labels_of(size)
    with redis.Redis.from_url(server.url, protocol=2) as admin:
        admin.flushall()
        requests = {"cold": await sent(admin, open_cache(server, model.encode, model.width), labels)}
        await fill(server, model, labels)
        label_bytes = [int(admin.memory_usage(key, samples=0)) for key in admin.keys("*:label:*")]
        [list_key] = admin.keys("*:list:*")
        list_bytes = int(admin.memory_usage(list_key, samples=0))
        requests["list in the store"] = await sent(admin, open_cache(server, forbidden, model.width), labels)
        warm = open_cache(server, forbidden, model.width)
        await warm.get(labels)
        requests["list in memory"] = await sent(admin, warm, labels)
        admin.delete(list_key)
        requests["labels in the store"] = await sent(admin, open_cache(server, forbidden, model.width), labels)
        changed = [*labels[1:], "a label that nobody knows"]
        requests["one label new"] = await sent(admin, open_cache(server, model.encode, model.width), changed)
    return {
        "labels": size,
        "bytes_per_label": statistics.mean(label_bytes),
        "list_bytes_per_label": list_bytes / size,
        "requests": requests,
    }


async def sent(admin: "redis.Redis", cache: LabelCache, labels: Sequence[str]) -> dict[str, Any]:
    """Round trips until the answer and behind it, commands by name as the server counts them, and encodings."""
    assert cache._access is not None
    await cache._access._store.ping()
    admin.config_resetstat()
    trips, encoded = cache.stats.store_round_trips, cache.stats.encoded_descriptions
    await cache.get(labels)
    until_answer = cache.stats.store_round_trips - trips
    await cache.drain()
    ignored = {"client", "config", "info", "ping", "select", "auth", "hello", "command"}
    found: dict[str, Any] = admin.info("commandstats")
    calls = {name.removeprefix("cmdstat_"): int(value["calls"]) for name, value in found.items()}
    answer = {
        "round_trips_until_answer": until_answer,
        "round_trips_behind": cache.stats.store_round_trips - trips - until_answer,
        "commands": {name: count for name, count in sorted(calls.items()) if name.split("|")[0] not in ignored},
        "encodings": cache.stats.encoded_descriptions - encoded,
    }
    await cache.close()
    return answer


async def variations(server: EmbeddedServer, width: int, rows: int, size: int, count: int) -> dict[str, Any]:
    """What `count` variations of a list of `size` labels leave behind, each with one label of its own."""
    model = StandIn(width, rows)
    labels = labels_of(size)
    memory_bytes = 64 * MIB
    process = psutil.Process()
    with redis.Redis.from_url(server.url, protocol=2) as admin:
        admin.flushall()
        cache = open_cache(server, model.encode, width, memory_bytes=memory_bytes)
        await cache.get(labels)
        await cache.drain()
        before = {"redis": used(admin), "process": process.memory_info().rss}
        started = time.perf_counter()
        for i in range(count):
            await cache.get([*labels[: i % size], *labels[i % size + 1 :], f"variation {i}"])
            if count >= 20 and i % (count // 20) == 0:
                print(f"\r{i:,} of {count:,} variations", end="", file=sys.stderr, flush=True)
        await cache.drain()
        print(file=sys.stderr)
        elapsed = time.perf_counter() - started
        kinds = dict.fromkeys(("label", "list", "seen", "lock"), 0)
        for key in admin.scan_iter(count=10_000):
            kinds[key.decode().split(":")[3]] += 1
        report = {
            "labels": size,
            "variations": count,
            "seconds_each": elapsed / count,
            "redis_bytes": used(admin) - before["redis"],
            "redis_bytes_each": (used(admin) - before["redis"]) / count,
            "redis_bytes_of_whole_lists": count * (size * rows * width * 2 + size * 4),
            "redis_evicted": int(admin.info("stats")["evicted_keys"]),
            "keys": kinds,
            "encodings": cache.stats.encoded_descriptions - size,
            "encodings_without_cache": count * size,
            "memory_tier_bytes": cache.stats.memory.held_bytes,
            "memory_tier_limit_bytes": memory_bytes,
            "process_growth_bytes": process.memory_info().rss - before["process"],
        }
        await cache.close()
    return report


def used(admin: "redis.Redis") -> int:
    """Bytes that the server has in use."""
    return int(admin.info("memory")["used_memory"])


# The report


def machine() -> dict[str, Any]:
    """Where the numbers are from."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _cpu_lines() if line.startswith("model name")), platform.processor()
    )
    return {
        "processor": model,
        "cores": psutil.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def tables(report: dict[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """The report's tables: a heading, and rows of which the first is the head."""
    first = [["labels", "encoded", "label entries", "list entry", "list entry against encoding"]]
    for row in report["times"]:
        first.append(
            [
                f"{row['labels']:,}",
                *(milliseconds(row[name]) for name in ("encode_s", "labels_s", "list_s")),
                f"{row['ratio_list']:.0f} x",
            ]
        )
    second = [["request", "round trips until the answer", "behind it", "commands, in scripts too", "encodings"]]
    for name, row in report["costs"]["requests"].items():
        commands = ", ".join(f"{count:,} {command}" for command, count in row["commands"].items()) or "none"
        second.append(
            [
                name,
                str(row["round_trips_until_answer"]),
                str(row["round_trips_behind"]),
                commands,
                str(row["encodings"]),
            ]
        )
    row = report["variations"]
    third = [["", "with the cache as it is", "otherwise"]]
    whole = f"{mebibytes(row['redis_bytes_of_whole_lists'])} if each list were kept"
    third += [
        ["bytes in the server", mebibytes(row["redis_bytes"]), whole],
        ["encodings", f"{row['encodings']:,}", f"{row['encodings_without_cache']:,} without a cache"],
        ["lists kept in the server", f"{row['keys']['list']:,}", f"{row['variations']:,}"],
        ["memory tier", mebibytes(row["memory_tier_bytes"]), f"{mebibytes(row['memory_tier_limit_bytes'])} at most"],
        ["growth of the process", mebibytes(row["process_growth_bytes"]), ""],
    ]
    return [
        ("A replica's first request for a known list", first),
        (f"What a request of {report['costs']['labels']:,} labels sends the server", second),
        (f"{row['variations']:,} one-off variations of {row['labels']:,} labels", third),
    ]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def mebibytes(count: float) -> str:
    return f"{count / MIB:,.1f} MiB"


def printed(report: dict[str, Any]) -> str:
    """The tables as plain text."""
    parts = []
    for heading, rows in tables(report):
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        parts.append("\n".join([heading, *lines]))
    return "\n\n".join(parts)


def markdown(report: dict[str, Any]) -> str:
    """The report as a page, with the picture beside it."""
    where = report["machine"]
    largest = report["times"][-1]
    verdict = "met" if largest["ratio_list"] >= TARGET_RATIO else "not met"
    parts = [
        "# What the label cache saves",
        "",
        f"Made by `python tests/benchmarks/label_cache.py {report['command']}` on {where['cores']} cores of "
        f"{where['processor']}, Python {where['python']}, torch {where['torch']} with {where['threads']} threads. "
        "One machine and one run: read the ratios, not the times. The server is the embedded Valkey on a unix socket; "
        "the model is the shipped default.",
        "",
        "![Time until the rows are there](label-cache.svg)",
        "",
        f"The target, {TARGET_RATIO} times as fast as encoding at {largest['labels']:,} labels, is {verdict}: "
        f"{largest['ratio_list']:.0f} times. Medians; a first request opens its connection as well.",
    ]
    costs_of = report["costs"]
    for heading, rows in tables(report):
        parts += ["", f"## {heading}", ""]
        parts += ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
        parts += ["| " + " | ".join(row) + " |" for row in rows[1:]]
        if heading.startswith("What a request"):
            parts += [
                "",
                f"A label takes {costs_of['bytes_per_label']:,.0f} bytes in the server as an entry of its own, key and "
                f"overhead included, and {costs_of['list_bytes_per_label']:,.0f} more in a list entry.",
            ]
    return "\n".join(parts) + "\n"


def picture(report: dict[str, Any]) -> str:
    """Bars of the times, on a logarithmic scale, as SVG."""
    names = (
        ("encode_s", "encoded", "#b5523b"),
        ("labels_s", "label entries", "#c9a227"),
        ("list_s", "list entry", "#2f6f8f"),
    )
    bars = [
        (f"{row['labels']:,} labels, {name}", row[key], colour)
        for row in report["times"]
        for key, name, colour in names
    ]
    smallest = 10 ** np.floor(np.log10(min(value for _, value, _ in bars)))
    decades = float(np.ceil(np.log10(max(value for _, value, _ in bars) / smallest)))
    left, width, step = 210, 420, 30
    height = 50 + step * len(bars) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 110}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="10" y="24" font-size="15">Time until the rows of a known list are there (logarithmic)</text>',
    ]
    for decade in range(int(decades) + 1):
        x = left + width * decade / decades
        lines.append(f'<line x1="{x:.0f}" x2="{x:.0f}" y1="40" y2="{height - 30}" stroke="#dddddd"/>')
        words = f"{smallest * 10**decade * 1e3:g} ms"
        lines.append(f'<text x="{x:.0f}" y="{height - 12}" text-anchor="middle" fill="#555555">{words}</text>')
    for i, (name, value, colour) in enumerate(bars):
        y = 46 + step * i
        length = width * float(np.log10(value / smallest)) / decades
        lines += [
            f'<text x="{left - 10}" y="{y + 15}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{left}" y="{y}" width="{length:.1f}" height="20" fill="{colour}"/>',
            f'<text x="{left + length + 6:.1f}" y="{y + 15}">{milliseconds(value)}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The whole report."""
    model = DefaultModel()
    with EmbeddedServer(max_memory_bytes=512 * MIB) as server:
        measured = [await times(server, model, size, options.repeats) for size in options.sizes]
        cost = await costs(server, model, options.sizes[0])
        rows = await model.encode(labels_of(options.sizes[0]))
        rows_each = round(len(rows.values) / len(rows))
        varied = await variations(server, model.width, rows_each, options.list_labels, options.variations)
    return {
        "command": " ".join(sys.argv[1:]),
        "machine": machine(),
        "times": measured,
        "costs": cost,
        "variations": varied,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="labels of the lists that are timed")
    parser.add_argument("--repeats", type=int, default=5, help="encodings of each list, of which the median counts")
    parser.add_argument("--list-labels", type=int, default=1_000, help="labels of the list that is varied")
    parser.add_argument("--variations", type=int, default=10_000)
    parser.add_argument("--output", type=Path, help="folder for label-cache.md, label-cache.json and label-cache.svg")
    options = parser.parse_args()
    report = asyncio.run(measure(options))
    print(printed(report))
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        for suffix, text in (
            ("md", markdown(report)),
            ("json", json.dumps(report, indent=2) + "\n"),
            ("svg", picture(report)),
        ):
            (options.output / f"label-cache.{suffix}").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
