"""Small data sets in the public ones' formats, and recipes that train on them within a second."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenalign.config import BackboneReference
from tokenalign.references import sha256_of
from tokenalign.training.encoder import Encoder, load_encoder
from tokenalign.training.material import Material, Sources, prepare
from tokenalign.training.recipes import BANKING77_RECIPE, Recipe
from tokenalign.training.run import RunOptions
from tokenalign.training.sources import DataSource, SourceFile

TOPICS = ["card", "cash", "payment", "loan", "rate", "pin", "fee", "iban"]
LABELS = [f"{topic}_declined" for topic in TOPICS]
DOMAINS = {
    "travel": ["book_flight", "lost_bag"],
    "home": ["play_song", "set_alarm"],
    "banking": ["pay_bill", "new_pin"],
}


CARD_LIKE = replace(BANKING77_RECIPE, name="card-like", label_groups=(4, 2, 2), max_epochs=3, learning_rate=1e-3)

EVERYTHING = replace(
    CARD_LIKE,
    name="everything",
    label_template="{label}",
    wordings=("{label}", "topic: {label}"),
    clinc150_domains=("travel", "home"),
    start="geometry",
    start_scale=20.0,
    schedule="cosine",
    batch_size=16,
    epoch_batches=5,
    candidates=3,
    other_texts=8,
    other_texts_weight=0.5,
    teacher_weight=0.5,
    average_decay=0.9,
)

COMPARISON = replace(
    EVERYTHING,
    name="comparison",
    shared_wording=True,
    start_pooled_share=1.0,
    trained="comparison",
    learning_rate=1e-2,
    episodes=2,
    epoch_batches=12,
    banking77_weight=2.0,
    teacher_weight=0.0,
)

HEAD_SHAPE = (("width", 32), ("ffn_width", 64))


@pytest.fixture(scope="session")
def card_like() -> Recipe:
    """The card's protocol on eight labels."""
    return CARD_LIKE


@pytest.fixture(scope="session")
def everything() -> Recipe:
    """All that a recipe can ask for."""
    return EVERYTHING


@pytest.fixture(scope="session")
def comparison() -> Recipe:
    """Episodes, in which only the comparison of rows learns."""
    return COMPARISON


@pytest.fixture(params=[CARD_LIKE, EVERYTHING, COMPARISON], ids=lambda recipe: recipe.name)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    """Each of the three."""
    found: Recipe = request.param
    return found


def messages(topic: str, count: int, lead: str) -> list[str]:
    """Messages about a topic, each different."""
    return [f"{lead} my {topic} was declined {'again ' * (i % 3)}{chr(97 + i)}" for i in range(count)]


def source(name: str, folder: Path) -> DataSource:
    """The files of a folder as a data set that is downloaded from there."""
    files = tuple(SourceFile(path.name, path.as_uri(), sha256_of(path)) for path in sorted(folder.iterdir()))
    return DataSource(name, "tests/data", "0" * 40, "none", files)


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder: eight labels of ten training and three test messages, and six intents in three domains."""
    root = tmp_path_factory.mktemp("data")
    banking77, clinc150 = root / "banking77", root / "clinc150"
    banking77.mkdir()
    clinc150.mkdir()
    (banking77 / "categories.json").write_text(json.dumps(LABELS))
    for partition, count, lead in (("train", 10, "help"), ("test", 3, "why is")):
        with (banking77 / f"{partition}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "category"])
            for topic, label in zip(TOPICS, LABELS, strict=True):
                writer.writerows([text, label] for text in messages(topic, count, lead))
    content: dict[str, Any] = {"oos_train": [["who won", "oos"]]}
    for partition in ("train", "val", "test"):
        content[partition] = [
            [f"{label.replace('_', ' ')} {partition} {chr(97 + i)}", label]
            for labels in DOMAINS.values()
            for label in labels
            for i in range(4)
        ]
    (clinc150 / "data_full.json").write_text(json.dumps(content))
    (clinc150 / "domains.json").write_text(json.dumps(DOMAINS))
    return root


@pytest.fixture(scope="session")
def small_sources(small_data: Path) -> Sources:
    """The small data sets with the hashes that they really have."""
    return Sources(source("banking77", small_data / "banking77"), source("clinc150", small_data / "clinc150"))


@pytest.fixture(scope="session")
def feature_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token states that the session's tests share."""
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="session")
def encoder(bert_backbone: Path) -> Encoder:
    """The tiny BERT, with a head of width 32 to be made."""
    found = load_encoder(
        BackboneReference(reference=str(bert_backbone)), name="tiny", label_template="{label}", device="cpu"
    )
    return replace(found, config=found.config.model_copy(update=dict(HEAD_SHAPE)))


@pytest.fixture(scope="session")
def material(encoder: Encoder, small_data: Path, small_sources: Sources, feature_dir: Path) -> Material:
    """The small data sets prepared for the recipe that asks for everything."""
    return prepare(EVERYTHING, 42, encoder, data_dir=small_data, feature_dir=feature_dir, sources=small_sources)


@pytest.fixture
def run_options(
    bert_backbone: Path, small_data: Path, small_sources: Sources, feature_dir: Path, tmp_path: Path
) -> Callable[..., RunOptions]:
    """Makes the options of a run on the small data; keywords override them."""

    def make(recipe: Recipe, **overrides: Any) -> RunOptions:
        values: dict[str, Any] = {
            "recipe": recipe,
            "output": tmp_path / "run",
            "data_dir": small_data,
            "feature_dir": feature_dir,
            "backbone": BackboneReference(reference=str(bert_backbone)),
            "device": "cpu",
            "local_only": True,
            "sources": small_sources,
            "head_shape": HEAD_SHAPE,
        }
        return RunOptions(**(values | overrides))

    return make


@pytest.fixture
def write_own(tmp_path: Path) -> Callable[..., Path]:
    """Writes a user's file of messages, ten of each of eight labels; `text` says what stands in a row instead."""

    def write(name: str, text: Callable[[str, str], str] = lambda text, label: text, lead: str = "help") -> Path:
        path = tmp_path / name
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            for topic, label in zip(TOPICS, LABELS, strict=True):
                writer.writerows([text(message, label), label] for message in messages(topic, 10, lead))
        return path

    return write
