"""A trained head's model card, made of its configuration and a report on it: nothing in it is typed by hand."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenalign.config import ModelConfig
from tokenalign.references import PACKAGE_PREFIX
from tokenalign.training.calibration import scarcity
from tokenalign.training.document import Block, Code, Heading, Items, Paragraph, Table
from tokenalign.training.report import differs, head_blocks

FEW_MESSAGES, FEW_LABELS = 200, 5


def front_matter(config: ModelConfig) -> str:
    """What a model hub reads at the top of a card."""
    reference = config.backbone.reference
    hub = not reference.startswith(PACKAGE_PREFIX) and not Path(reference).is_absolute()
    lines = ["library_name: tokenalign", "pipeline_tag: zero-shot-classification"]
    return "\n".join(["---", *lines, *([f"base_model: {reference}"] if hub else []), "---", "", ""])


def card_blocks(config: ModelConfig, report: Mapping[str, Any]) -> list[Block]:
    """The card: what the head is, what it was trained on and how, how good it is, and its limits."""
    provenance = config.provenance
    return [
        Heading(config.name, 1),
        Paragraph(
            f"A head of tokenalign on the frozen encoder {config.backbone.reference}: it scores a text against label "
            f"descriptions that come with the request, by late interaction. It reads {config.max_length} tokens of a "
            "text."
        ),
        Code(
            "python",
            [
                "from tokenalign import TokenAlignClassifier",
                "",
                'classifier = TokenAlignClassifier.from_pretrained("…")  # this folder',
                f"print(classifier('…', {_example_labels(provenance)!r}))",
            ],
        ),
        Heading("Training"),
        Items(training_sentences(config)),
        *([_validation(provenance["training"])] if "training" in provenance else []),
        Heading("Evaluation"),
        *(
            replace(block, level=block.level + 1) if isinstance(block, Heading) else block
            for block in head_blocks(report)
        ),
        Heading("Limits"),
        Items(limits(config, report)),
    ]


def training_sentences(config: ModelConfig) -> list[str]:
    """How the head was made, as far as it says so itself."""
    provenance = config.provenance
    if "recipe" not in provenance:
        return ["The head doesn't say how it was made."]
    recipe, split = provenance["recipe"], provenance["split"]
    sizes = {name: part["examples"] for name, part in split["partitions"].items()}
    sentences = [
        f"Data: {_sources(provenance['data'])}. Partitions: "
        + ", ".join(f"{name} {count:,}" for name, count in sizes.items())
        + ".",
        f"Split of seed {split['seed']}: "
        + (
            "every label trains, validates and is tested, on different messages."
            if split.get("kind") == "messages"
            else f"{len(split['train_labels'])} labels train, {len(split['validation_labels'])} others validate, "
            f"{len(split['test_labels'])} others test."
        ),
        f"AdamW, learning rate {recipe['learning_rate']:g} ({recipe['schedule']}), weight decay "
        f"{recipe['weight_decay']:g}, batch {recipe['batch_size']}, gradient norm {recipe['clip_norm']:g}, at most "
        f"{recipe['max_epochs']} epochs, patience {recipe['patience']} on validation NLL"
        + (
            f", of which less than {least:g} counts for nothing."
            if (least := recipe.get("min_improvement", 0))
            else "."
        ),
        f"Encoder weights: sha256 {config.backbone.sha256}.",
        f"Label template {config.label_template!r}; temperature {config.temperature:.4f}, fitted after training on "
        "messages that selected nothing.",
    ]
    if "training" in provenance:
        found = provenance["training"]
        sentences.append(f"The kept weights are those of epoch {found['best_epoch']} of {found['epochs']}.")
    return sentences


def limits(config: ModelConfig, report: Mapping[str, Any]) -> list[str]:
    """What the figures don't show, and where the head is to be mistrusted; those that the figures show come first."""
    found = [
        f"On {name} it is {'worse' if differs(compared) else 'not measurably better'} than {other}: accuracy "
        f"{compared['differences']['accuracy']:+.3f}."
        for name, result in report["results"].items()
        for other, compared in result["comparisons"].items()
        if not (differs(compared) and compared["differences"]["accuracy"] > 0)
    ]
    for name, result in report["results"].items():
        figures = result["model"]
        if figures["examples"] < FEW_MESSAGES:
            found.append(f"{name} has {figures['examples']} messages only: its figures are rough.")
        weak = [score["label"] for score in figures["per_class"] if score["examples"] and score["f1"] < 0.5]
        if weak:
            shown = ", ".join(weak[:5]) + (" …" if len(weak) > 5 else "")
            found.append(f"On {name}, {len(weak)} of {figures['classes']} labels have an F1 below 0.5: {shown}.")
        if (scope := result.get("out_of_scope")) is not None and "abstention" in scope:
            inside, outside = (scope["abstention"][f"{kind}_answered"] for kind in ("in_scope", "out_of_scope"))
            found.append(
                f"With its own min_score {inside:.0%} of the messages of {name} get a label, and {outside:.0%} of the "
                "texts that no label fits."
            )
    split = config.provenance.get("split", {})
    validation = len(split.get("validation_labels", ()))
    if split.get("kind") == "messages":
        found.append("Tested on the labels that it was trained on: how it does on others is unknown.")
    if validation and validation < FEW_LABELS:
        found.append(f"Its best epoch and calibrations rest on {validation} labels, which is few.")
    if config.provenance.get("training", {}).get("best_epoch") == 0:
        found.append("No epoch of its training was better than its start, so it is as it began.")
    if (scarce := scarcity(config.provenance.get("training", {}))) is not None:
        found.append(f"{scarce[0].upper()}{scarce[1:]}.")
    if validation:
        found.append(
            f"The temperature was fitted with {validation} candidates; with many more, or with labels of another "
            "domain, scores are off."
        )
    return [
        *found,
        "It was trained and tested on one split of one kind of data; other domains and languages are unmeasured, and "
        "whether its encoder met the test messages in its own training is unknown.",
        "Unasked it always names one of the labels it is given; min_score and min_margin let it name none.",
        *(
            ["Messages to which several labels apply were not among those that calibrated its independent scores."]
            if config.multi_label is not None
            else ["It has no calibration for independent scores (multi_label)."]
        ),
        f"Of a text it reads {config.max_length} tokens, unless it is asked to read in windows.",
        "A highlighted match is a part of the score, not a proof of why the text means what it does.",
        "Labels that share their words are told apart worst; longer descriptions are not always better.",
    ]


def _validation(training: Mapping[str, Any]) -> Table:
    keys = ("accuracy", "macro_f1", "nll", "brier", "ece")
    return Table(
        ["validation", "messages", "labels", "accuracy", "macro F1", "NLL", "Brier", "ECE"],
        [
            [what, f"{row['examples']:,}", str(row["classes"]), *(f"{row[key]:.3f}" for key in keys)]
            for what, row in (
                ("chose the epoch", training["validation_select"]),
                ("fitted the temperature", training["validation_calibrate"]),
            )
        ],
    )


def _sources(data: Mapping[str, Any]) -> str:
    parts = []
    for name, source in data.items():
        if name == "own":
            parts.append(f"{source['data']['file']} (sha256 {source['data']['sha256'][:12]}…)")
        else:
            parts.append(f"{source['repository']} at {source['revision'][:12]}… ({source['licence']})")
    return "; ".join(parts)


def _example_labels(provenance: Mapping[str, Any]) -> list[str]:
    labels = provenance.get("split", {}).get("train_labels", [])
    return [str(label).replace("_", " ") for label in labels[:2]] or ["duplicate charge", "card not received"]
