"""What the parts of the suite share: options, texts, one running service and one loaded library."""

import contextlib
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.benchmarks.children import ROOT, Child
from tests.benchmarks.corpus import Corpus, load_corpus
from tests.benchmarks.served import Front, Served, serving, shipped_config

SHIPPED = "shipped"
PEERS_PYTHON = ROOT / ".venv-bench" / "bin" / "python"


@dataclass(frozen=True, slots=True)
class Options:
    """How much is measured.

    scale: of every window's length; a smoke run makes it small
    dtype: of the encoder, of the service and of the library that it is compared with; "shipped" is what
      serve_config.yaml says
    front: which proxy the service has; "shipped" leaves it to the product
    """

    repeats: int = 3
    scale: float = 1.0
    connections: tuple[int, ...] = (1, 8, 32, 64, 128)
    label_counts: tuple[int, ...] = (8, 77, 256, 1_024, 2_048)
    front: Front = "shipped"
    dtype: str = SHIPPED
    overload_s: float = 30.0
    quality_texts: int | None = None
    library_texts: int = 1_024
    peers_python: Path = PEERS_PYTHON

    @classmethod
    def quick(cls, **chosen: Any) -> "Options":
        """Enough to see that every part works; the numbers are worth nothing."""
        small = {
            "repeats": 1, "scale": 0.3, "connections": (1, 64), "label_counts": (8, 1_024), "overload_s": 8.0,
            "quality_texts": 256, "library_texts": 256,
        }  # fmt: skip
        return cls(**{**small, **chosen})


@dataclass
class Bench:
    """Starts what parts need when they first need it; everything ends with the `with`."""

    options: Options
    corpus: Corpus = field(default_factory=load_corpus)
    _service: Served | None = None
    _library: Child | None = None
    _service_stack: ExitStack = field(default_factory=ExitStack)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_service()
        self._stack.close()

    @property
    def service(self) -> Served:
        """The application as it ships, in the chosen dtype, running."""
        if self._service is None:
            say("starting the service")
            config = shipped_config(model={"dtype": self.dtype})
            self._service = self._service_stack.enter_context(serving(config, self.options.front))
        return self._service

    @property
    def dtype(self) -> str:
        """Of the encoder."""
        if self.options.dtype != SHIPPED:
            return self.options.dtype
        settings = shipped_config()["applications"][0].get("args", {})
        return str(settings.get("model", {}).get("dtype", "auto"))

    def stop_service(self) -> None:
        """Ends the service, where it runs; the next part that needs it gets a new one."""
        if self._service is not None:
            say("stopping the service")
        self._service = None
        self._service_stack.close()

    @property
    def library(self) -> Child:
        """The library in a process of its own, the same model loaded."""
        if self._library is None:
            self._library = self._stack.enter_context(loaded_library(self.dtype))
        return self._library


@contextlib.contextmanager
def loaded_library(dtype: str, model: str | None = None) -> Iterator[Child]:
    """A library process with a model; ended at the end of the `with`."""
    with Child("tests.benchmarks.library") as child:
        child.ask("load", model=model, dtype=dtype)
        yield child


_STARTED = time.monotonic()


def say(words: str) -> None:
    """Tells whoever waits what is being done, and when."""
    print(f"[{time.monotonic() - _STARTED:6.1f} s] {words}", file=sys.stderr, flush=True)
