"""Requests per second of the served default model beside texts per second of the library, in one run.

    python tests/benchmarks/service.py [--seconds 10] [--connections 1 8 32 128] [--output report.json]

Needs Debian's `wrk` and the data sets beside the project. Every request brings one Banking77 message and all 77 labels;
messages are distinct until they come round (3,080 of them). The library has the machine to itself; the service shares
it with its proxy and the load generator, whose share of the processors is reported.
"""

import argparse
import csv
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data" / "banking77"
URL = "http://127.0.0.1:8000"

LUA = """
local bodies = {}
for line in io.lines("%(bodies)s") do bodies[#bodies + 1] = line end
local next = %(start)d
wrk.method = "POST"
wrk.headers["content-type"] = "application/json"
request = function()
  next = next %% #bodies + 1
  return wrk.format(nil, "/v1/classify", nil, bodies[next])
end
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=10, help="of load at each number of connections")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with (DATA / "test.csv").open(encoding="utf-8") as file:
        texts = [row["text"] for row in csv.DictReader(file)]
    labels = [name.replace("_", " ") for name in json.loads((DATA / "categories.json").read_text(encoding="utf-8"))]
    report: dict[str, Any] = {"labels": len(labels), "cores": psutil.cpu_count()}
    report["library"] = subprocess_library(texts, labels)
    report["service"] = service(texts, labels, options.connections, options.seconds)
    best = max(report["library"].values())
    print(f"\nlibrary, one process, texts/s by batch size: {report['library']}")
    print(
        f"{'connections':>12} {'requests/s':>11} {'of library':>11} {'p50 ms':>8} {'p99 ms':>8} {'load gen. CPUs':>15}"
    )
    for row in report["service"]["loads"]:
        print(
            f"{row['connections']:>12} {row['requests_per_s']:>11.1f} {row['requests_per_s'] / best:>11.2f} "
            f"{row['p50_ms']:>8.1f} {row['p99_ms']:>8.1f} {row['load_generator_cpus']:>15.2f}"
        )
    print(f"seconds to ready: {report['service']['ready_s']:.0f}")
    if options.output:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def subprocess_library(texts: list[str], labels: list[str]) -> dict[str, float]:
    """Texts per second of the library by batch size, in a process of its own so that nothing of it stays resident."""
    code = "import json,sys; from service import library; print(json.dumps(library(*json.load(sys.stdin))))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([texts, labels]),
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
    )
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return rates


def library(texts: list[str], labels: list[str]) -> dict[str, float]:
    """Texts per second by texts per call, labels known; the median of three passes over 1,024 messages."""
    from tokenalign import TokenAlignClassifier

    classifier = TokenAlignClassifier.from_pretrained(device="cpu")
    classifier(texts[:32], labels)
    rates = {}
    for size in (1, 32, 128, 512):
        chosen = texts[: 1024 if size > 1 else 128]
        passes = []
        for _ in range(3):
            started = time.perf_counter()
            for start in range(0, len(chosen), size):
                classifier(chosen[start : start + size], labels)
            passes.append(len(chosen) / (time.perf_counter() - started))
        rates[str(size)] = round(statistics.median(passes), 1)
    return rates


def service(texts: list[str], labels: list[str], connections: list[int], seconds: int) -> dict[str, Any]:
    """Starts the application, loads it with each number of connections, ends it."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        bodies = Path(folder) / "bodies"
        bodies.write_text("".join(json.dumps({"text": text, "labels": labels}) + "\n" for text in texts))
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "serve", str(ROOT / "serve_config.yaml")],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            wait_until_ready(process)
            ready_s = time.monotonic() - started
            load(bodies, 0, 8, 3)  # warms caches and connections, not reported
            loads = [load(bodies, 701 * i, count, seconds) for i, count in enumerate(connections, 1)]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    return {"ready_s": round(ready_s, 1), "loads": loads}


def wait_until_ready(process: "subprocess.Popen[bytes]") -> None:
    while process.poll() is None:
        try:
            if httpx.get(f"{URL}/health/ready", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise SystemExit("the application ended by itself")


def load(bodies: Path, start: int, connections: int, seconds: int) -> dict[str, Any]:
    """One run of wrk; refuses to report a run in which a request failed."""
    script = bodies.with_name("load.lua")
    script.write_text(LUA % {"bodies": bodies, "start": start})
    command = [
        "wrk",
        "-t1",
        f"-c{connections}",
        f"-d{seconds}s",
        "--timeout",
        "30s",
        "--latency",
        "-s",
        str(script),
        URL,
    ]
    process = psutil.Popen(command, stdout=subprocess.PIPE, text=True)
    cpu_s = 0.0
    while process.poll() is None:
        try:
            cpu_s = sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            break
        time.sleep(0.1)
    output = process.stdout.read()
    if "Non-2xx" in output or "Socket errors" in output:
        raise SystemExit(f"requests failed at {connections} connections:\n{output}")
    return {
        "connections": connections,
        "requests_per_s": float(re.search(r"Requests/sec:\s+([\d.]+)", output)[1]),
        "p50_ms": milliseconds(re.search(r"^ +50%\s+(\S+)", output, re.MULTILINE)[1]),
        "p99_ms": milliseconds(re.search(r"^ +99%\s+(\S+)", output, re.MULTILINE)[1]),
        "load_generator_cpus": round(cpu_s / seconds, 2),
    }


def milliseconds(word: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)(us|ms|s|m)", word).groups()
    return float(number) * {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}[unit]


if __name__ == "__main__":
    main()
