"""A user's own data as a run trains on it: the recipe's settings for it, and its material."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenalign.errors import TrainingError
from tokenalign.labels import LabelSet
from tokenalign.training.encoder import Encoder
from tokenalign.training.material import Material, OnFeatures, material_of
from tokenalign.training.own_data import OwnData
from tokenalign.training.recipes import Recipe
from tokenalign.training.splits import SplitKind

LABELS_FILE = "labels.jsonl"

OWN_RECIPE = Recipe(
    name="own",
    label_template="{label}",
    wordings=("{label}",),
    start="geometry",
    start_scale=20.0,
    learning_rate=3e-4,
    min_improvement=1e-3,
)
"""The model card's protocol, begun at the encoder's own geometry: few messages don't teach a random head its words.

And ended where NLL has all but stopped to fall, as it does on validation messages that are all answered right.
"""


def own_recipe(
    name: str,
    *,
    label_template: str | None = None,
    max_epochs: int | None = None,
    patience: int | None = None,
    learning_rate: float | None = None,
    batch_size: int | None = None,
) -> Recipe:
    """`OWN_RECIPE` under the name of the head to be, with what was asked for otherwise."""
    changes: dict[str, Any] = {
        "label_template": label_template,
        "wordings": None if label_template is None else (label_template,),
        "max_epochs": max_epochs,
        "patience": patience,
        "learning_rate": learning_rate,
        "batch_size": batch_size,
    }
    for option, value in changes.items():
        if isinstance(value, int | float) and not value > 0:
            raise TrainingError(f"{option.replace('_', '-')} is {value}; it must be more than 0")
    return replace(OWN_RECIPE, name=name, **{key: value for key, value in changes.items() if value is not None})


def for_labels(recipe: Recipe, labels: LabelSet) -> Recipe:
    """The recipe with as many wordings as the label with most descriptions needs for each to be drawn."""
    return replace(recipe, wordings=recipe.wordings * max(len(label.descriptions) for label in labels.labels))


def prepare_own(
    recipe: Recipe,
    seed: int,
    encoder: Encoder,
    own: OwnData,
    kind: SplitKind,
    *,
    feature_dir: Path,
    on_features: OnFeatures | None = None,
) -> Material:
    """The material of one seed; messages of the test partition are not even encoded."""
    split = own.split(kind, seed)
    wanted = {example.text for name, part in split.partitions.items() if name != "test" for example in part}
    used = tuple(example for example in own.corpus.examples["train"] if example.text in wanted)
    return material_of(
        recipe,
        encoder,
        {"own": replace(own.corpus, examples={"train": used})},
        split,
        {"own": own.provenance},
        feature_dir=feature_dir,
        descriptions=own.descriptions,
        on_features=on_features,
    )


def write_labels(folder: Path, labels: LabelSet) -> None:
    """Write the labels and their descriptions as a labels file, so that the head can be asked about them."""
    lines = [
        json.dumps({"name": label.name, "description": list(label.descriptions)}, ensure_ascii=False)
        for label in labels.labels
    ]
    (folder / LABELS_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
