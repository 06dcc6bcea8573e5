"""Bulk classification on a real cluster of two Ray nodes, beside the same job on one machine."""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray

from tokenalign.cli import main

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PATIENCE_S = 180.0  # of the machine, not a promise
ROWS = 5_000  # five windows: more than actors, so that each answers several
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # no other cluster of this machine is joined by mistake
}


def run(*words: str, code: int = 0) -> str:
    """stderr of `tokenalign-deploy bulk`."""
    command = [sys.executable, "-m", "deploy.cli", "bulk", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=ENVIRONMENT)
    assert done.returncode == code, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def address(free_port: Callable[[], int]) -> Iterator[str]:
    """The address of a cluster of two nodes of one CPU each, with ports and a folder of its own."""
    folder = tempfile.mkdtemp(prefix="bulk-", dir="/tmp")
    gcs = free_port()
    address = f"{ray.util.get_node_ip_address()}:{gcs}"
    common = ["--num-cpus", "1", "--object-store-memory", str(80 * 2**20), "--block", "--disable-usage-stats"]
    common += ["--dashboard-agent-listen-port"]
    head = ["--head", "--port", str(gcs), "--temp-dir", folder, "--include-dashboard", "false"]
    head += ["--ray-client-server-port", str(free_port())]
    processes = []
    try:
        for own in (head, ["--address", address]):
            words = [sys.executable, "-m", "ray.scripts.scripts", "start", *own, *common, str(free_port())]
            log = (Path(folder) / f"node-{len(processes)}.log").open("w")
            with log:
                processes.append(
                    subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT, cwd=ROOT)
                )
            wait_for_nodes(address, len(processes), Path(log.name), processes)
        yield address
    finally:
        # `ray start` told to end takes half a minute for it here, and nothing that it holds is of use to anybody.
        ours = [psutil.Process(process.pid) for process in processes]
        started = [child for process in ours for child in process.children(recursive=True)]
        for each in [*ours, *started]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        for process in processes:
            process.wait()
        psutil.wait_procs(started, timeout=30)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_nodes(address: str, nodes: int, log: Path, processes: list["subprocess.Popen[bytes]"]) -> None:
    code = (
        f"import ray; ray.init({address!r}, log_to_driver=False, logging_level='ERROR'); "
        f"raise SystemExit(sum(node['Alive'] for node in ray.nodes()) != {nodes})"
    )
    deadline = time.monotonic() + PATIENCE_S
    while subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, env=ENVIRONMENT).returncode:
        assert all(process.poll() is None for process in processes), log.read_text()
        assert time.monotonic() < deadline, log.read_text()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, bert_head: Path) -> tuple[Path, list[str]]:
    """A folder with good and bad rows, and the options of a run on them."""
    folder = tmp_path_factory.mktemp("bulk")
    (folder / "labels.txt").write_text("card payment\ncash declined\nnot received\n")
    with (folder / "in.jsonl").open("w") as file:
        for i in range(ROWS):
            text = "card was charged twice " * (i % 7 + 1)
            file.write(json.dumps({"text": f"{text}{i}", "id": f"r{i}"}) + "\n" if i % 100 else '{"text": "\\u200b"}\n')
    options = ["--labels-file", str(folder / "labels.txt"), "--id-column", "id", "--top-k", "2"]
    return folder, [*options, "--model", str(bert_head), "--device", "cpu", "--local-only"]


@pytest.fixture(scope="module")
def expected(job: tuple[Path, list[str]]) -> tuple[bytes, bytes]:
    """What `tokenalign batch` makes of it."""
    folder, options = job
    assert main(["batch", str(folder / "in.jsonl"), str(folder / "one.jsonl"), *options]) == 3
    return (folder / "one.jsonl").read_bytes(), (folder / "one.errors.jsonl").read_bytes()


def close(found: bytes, expected: bytes) -> bool:
    """Whether lines agree; scores to six digits, since actors may compute with another number of threads."""
    ours, theirs = [[json.loads(line) for line in part.splitlines()] for part in (found, expected)]
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert our.pop("scores") == pytest.approx(their.pop("scores"), abs=1e-6)
        assert our.pop("score") == pytest.approx(their.pop("score"), abs=1e-6)
    return ours == theirs


def test_two_nodes_answer_as_one_machine(
    address: str, job: tuple[Path, list[str]], expected: tuple[bytes, bytes]
) -> None:
    """Same rows in the same order, same side file, with an actor on each node."""
    folder, options = job
    words = [str(folder / "in.jsonl"), str(folder / "two.jsonl"), *options, "--address", address, "--actors", "2"]
    said = run(*words, code=3)
    assert f"4,950 rows answered: {folder / 'two.jsonl'}; 50 bad rows" in said
    assert close((folder / "two.jsonl").read_bytes(), expected[0])
    assert (folder / "two.errors.jsonl").read_bytes() == expected[1]
    assert not (folder / "two.jsonl.progress.json").exists()


def test_a_stopped_run_goes_on(address: str, job: tuple[Path, list[str]], expected: tuple[bytes, bytes]) -> None:
    """The driver is killed after its first window; the same command answers the rest."""
    folder, options = job
    output = folder / "killed.jsonl"
    words = [str(folder / "in.jsonl"), str(output), *options, "--address", address]
    command = [sys.executable, "-m", "deploy.cli", "bulk", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT, env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (output.exists() and output.stat().st_size):
            assert process.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline, "nothing was written"
            time.sleep(0.005)  # a condition of another process, asked for again
    finally:
        process.kill()
        process.wait()
    assert (folder / "killed.jsonl.progress.json").exists()
    assert "going on with the unfinished run" in run(*words, code=3)
    assert close(output.read_bytes(), expected[0])
    assert (folder / "killed.errors.jsonl").read_bytes() == expected[1]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--actors", "0"], "--actors is 0"),
        (["--model", "./missing"], "the cluster could not go on"),
        (["--text-column", "body"], "in.csv has no column 'body'"),
    ],
)
def test_errors_are_told(address: str, job: tuple[Path, list[str]], more: list[str], words: str) -> None:
    """Exit status 2 and what is wrong, of the options or of an actor."""
    folder, options = job
    (folder / "in.csv").write_text("text\ncard\n")
    said = run(
        str(folder / "in.csv"),
        str(folder / "bad.jsonl"),
        *options[:2],
        "--address",
        address,
        *more,
        "--overwrite",
        code=2,
    )
    assert words in said
