"""Processes that measure apart from the suite, asked in JSON lines over their standard input and output."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
STOP_S = 20.0


class ChildError(Exception):
    """A measuring process failed; its own words follow."""


class Child:
    """A Python module that runs as a process of its own: `ask` sends it an operation and gives its answer.

    python: the interpreter, of this environment or another
    """

    def __init__(self, module: str, python: Path | str = sys.executable) -> None:
        self._module = module
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in `close`
        self._process = subprocess.Popen(
            [str(python), "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, value: dict[str, Any]) -> None:
        """Writes one line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure() from error

    def receive(self) -> dict[str, Any]:
        """The next line that it wrote; `ChildError` when it ended instead or wrote an error."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildError(f"{self._module}: {answer['error']}")
        return answer

    def ask(self, operation: str, **arguments: Any) -> Any:
        """What the child's function of that name returns."""
        self.send({"operation": operation, **arguments})
        return self.receive()["answer"]

    def close(self) -> None:
        """Ends the process: asked first, then by force."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def _failure(self) -> ChildError:
        status = self._process.wait(STOP_S)
        self._errors.seek(0)
        return ChildError(f"{self._module} ended with status {status}:\n{self._errors.read()[-3_000:]}")


def answer_questions(operations: dict[str, Callable[..., Any]]) -> None:
    """The child's side: reads questions until its input ends, writes an answer or an error to each.

    What a library prints goes to standard error, so that it can't be taken for an answer.
    """
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        question = json.loads(line)
        name = question.pop("operation")
        try:
            reply = {"answer": operations[name](**question)}
        except Exception as error:  # noqa: BLE001  whoever asked gets it
            reply = {"error": f"{name}: {type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)
