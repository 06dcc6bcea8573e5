"""A report for people: the figures of `assess` as tables, plots and sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenalign.evaluation import ReliabilityBin
from tokenalign.training.document import Block, Heading, Items, Paragraph, Plot, Table
from tokenalign.training.plots import interval_plot, reliability_diagram

HEAD = "this head"
COLUMNS = {"accuracy": "accuracy", "macro_f1": "macro F1", "micro_f1": "micro F1"} | {
    "nll": "NLL",
    "brier": "Brier",
    "ece": "ECE",
}
INTERVALS = ("accuracy", "macro_f1", "nll", "brier", "ece")
SIGNIFICANT = 0.05


def report_blocks(report: Mapping[str, Any]) -> list[Block]:
    """The report on one head, or, where there are `runs`, on each and on all of them together."""
    if "runs" not in report:
        return [Heading(f"Evaluation of {report['model']['name']}", 1), *head_blocks(report)]
    blocks: list[Block] = [Heading(f"Evaluation of {len(report['runs'])} runs", 1), *_summary(report["summary"])]
    for number, run in enumerate(report["runs"], start=1):
        seed = "" if run["split"] is None else f", seed {run['split']['seed']}"
        blocks += [Heading(f"Run {number}: {run['model']['name']}{seed}"), *head_blocks(run)]
    return blocks


def head_blocks(report: Mapping[str, Any]) -> list[Block]:
    """Everything about one head, below its title."""
    blocks: list[Block] = [Paragraph(provenance_sentence(report)), *_leakage(report)]
    for name, result in report["results"].items():
        blocks += [Heading(f"{name}: {result['what']}"), *split_blocks(name, result)]
    if "cost" in report:
        blocks += [Heading("Cost"), *_cost(report["cost"])]
    return blocks


def provenance_sentence(report: Mapping[str, Any]) -> str:
    """Which model it is, and how it was calibrated."""
    model = report["model"]
    limit = model["abstention"]
    return (
        f"Model {model['name']}, fingerprint {model['fingerprint'][:12]}; temperature {model['temperature']:.4f}"
        + ("" if model["multi_label"] is None else "; independent scores are calibrated")
        + ("" if limit is None else f"; calibrated min_score {limit['min_score']:.3f} of {limit['labels']} labels")
        + "."
    )


def split_blocks(name: str, result: Mapping[str, Any]) -> list[Block]:
    """One split: the figures beside the baselines', what differs, calibration, classes, and what was asked for more."""
    figures = result["model"]
    rows = {HEAD: figures, **result["baselines"], **result["others"]}
    blocks: list[Block] = [
        Paragraph(f"{figures['examples']:,} messages, {figures['classes']} candidate labels."),
        Table(["", "messages", *COLUMNS.values()], [_row(of, found) for of, found in rows.items()]),
    ]
    if figures["intervals"]:
        blocks.append(Plot(f"accuracy-{name}", f"accuracy on {name}, with 95 % intervals", _accuracies(name, rows)))
        blocks.append(_intervals(rows))
        blocks += _comparisons(result["comparisons"])
    if flattered := trained_sentences(result):
        blocks.append(Items(flattered))
    blocks += [Items([f"Left out: {what}, since {why}." for what, why in result["skipped"].items()])] * bool(
        result["skipped"]
    )
    blocks.append(Paragraph(matches_sentence(result["matches"])))
    diagram = reliability_diagram(f"Reliability on {name}", [ReliabilityBin(**bin_) for bin_ in figures["reliability"]])
    blocks.append(Plot(f"reliability-{name}", f"reliability diagram of {name}, ECE {figures['ece']:.3f}", diagram))
    if "out_of_scope" in result:
        blocks += _out_of_scope(result["out_of_scope"])
    if "wordings" in result:
        blocks += _wordings(result["wordings"])
    if figures["confusions"]:
        blocks += [Heading("Worst pairs", 3), _confusions(figures["confusions"])]
    return [*blocks, Heading("Every class", 3), _classes(figures["per_class"])]


def matches_sentence(matches: Mapping[str, Any]) -> str:
    """What the matches mean: how far they stand out, and what deleting the matched words costs."""
    line = f"Matches: best minus median similarity {matches['gap']:.3f}"
    if "erasure" not in matches:
        return line
    found = matches["erasure"]
    if found is None:
        return f"{line}; no text had a word beside the matched ones to delete"
    ratio = "infinitely" if found["ratio"] is None else f"{found['ratio']:.1f} times"
    return (
        f"{line}; without the matched words the winning logit falls by {found['matched_drop']:.2f}, without as many "
        f"random words by {found['random_drop']:.2f}: {ratio} as much ({found['texts']} texts)"
    )


def differs(found: Mapping[str, Any]) -> bool:
    """Whether two models' accuracies differ by more than chance, by McNemar's exact test at 5 %.

    Not by whether the bootstrap's interval holds 0: with few messages that one model alone has right, the percentile
    interval is too narrow, and leaves 0 out at p 0.06 (five against none).
    """
    return bool(found["p_value"] < SIGNIFICANT)


def comparison_sentence(name: str, found: Mapping[str, Any]) -> str:
    """Whether the head is better or worse than another model, and the interval of the difference."""
    difference = found["differences"]["accuracy"]
    low, high = found["intervals"]["accuracy"]
    way = "better" if difference > 0 else "worse"
    verdict = f"{way} by more than chance" if differs(found) else "which chance explains"
    return (
        f"Against {name}, on {found['examples']:,} messages: accuracy {difference:+.3f}, {verdict}: the head alone is "
        f"right on {found['only_first']:,}, the other alone on {found['only_second']:,} (McNemar's exact p "
        f"{_p(found['p_value'])}). Bootstrap's 95 % interval of the difference: {low:+.3f} to {high:+.3f}."
    )


def trained_sentences(result: Mapping[str, Any]) -> list[str]:
    """Which of the other heads were trained on labels of this split, which may be unseen to this head alone."""
    classes = result["model"]["classes"]
    return [
        f"Mind that {name} was trained on {found['trained_labels']} of these {classes} labels."
        for name, found in result["others"].items()
        if found["trained_labels"]
    ]


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else "below 0.001"


def _row(name: str, figures: Mapping[str, Any]) -> list[str]:
    return [name, f"{figures['examples']:,}", *(f"{figures[key]:.3f}" for key in COLUMNS)]


def _intervals(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    return Table(
        ["95 % intervals", *(COLUMNS[key] for key in INTERVALS)],
        [
            [name, *("{:.3f} to {:.3f}".format(*figures["intervals"][key]) for key in INTERVALS)]
            for name, figures in rows.items()
        ],
    )


def _accuracies(name: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    return interval_plot(
        f"Accuracy on {name}, 95 % intervals",
        {of: (figures["accuracy"], *figures["intervals"]["accuracy"]) for of, figures in rows.items()},
    )


def _comparisons(comparisons: Mapping[str, Any]) -> list[Block]:
    return [Items([comparison_sentence(name, found) for name, found in comparisons.items()])] if comparisons else []


def _leakage(report: Mapping[str, Any]) -> list[Block]:
    trained_on, split = report["trained_on"], report["split"]
    if trained_on:
        return [
            Paragraph(f"Warning: the head was trained on {trained_on:,} of these messages; its figures flatter it.")
        ]
    if split is None:
        return []
    leakage = split["leakage"]
    removed = ", ".join(f"{count} of {name}" for name, count in leakage["duplicates_removed"].items() if count)
    shared = sum(leakage["shared_with_training"].values())
    return [
        Paragraph(
            f"Split of seed {split['seed']}: {_groups(split)}. "
            f"Duplicates left out, by case and white space: {removed or 'none'}. Held-out texts that were trained on: "
            f"{shared}."
        )
    ]


def _groups(split: Mapping[str, Any]) -> str:
    if split.get("kind") == "messages":
        return f"all {len(split['train_labels'])} labels train, validate and test, on different messages"
    sizes = [len(split[f"{group}_labels"]) for group in ("train", "validation", "test")]
    return "{} labels to train, {} to validate, {} to test".format(*sizes)


def _out_of_scope(found: Mapping[str, Any]) -> list[Block]:
    rows = [
        [f"{who}, {score}", f"{one['auroc']:.3f}", f"{one['fpr_at_95_recall']:.3f}"]
        for who, key in ((HEAD, "model"), ("cosine, raw labels", "cosine, raw labels"))
        for score, one in found[key].items()
    ]
    blocks: list[Block] = [
        Heading("Out of scope", 3),
        Paragraph(
            f"{found['texts']:,} texts that no label fits, against the messages of this split. AUROC 0.5 is chance; "
            "the false positive rate is the share of those texts that are answered where 95 % of the messages are."
        ),
        Table(["score", "AUROC", "FPR at 95 % recall"], rows),
    ]
    if "abstention" in found:
        limit = found["abstention"]
        blocks.append(
            Paragraph(
                f"With min_score calibrated ({limit['min_score']:.3f}, fitted with {limit['labels']} candidates), "
                f"{limit['in_scope_answered']:.1%} of the "
                f"messages get a label, and {limit['out_of_scope_answered']:.1%} of the texts that should not."
            )
        )
    return blocks


def _wordings(found: Mapping[str, Mapping[str, float]]) -> list[Block]:
    rows = [
        [name, f"{one['accuracy']:.3f}", f"{one['nll']:.3f}", f"{one['right_probability']:.3f}"]
        for name, one in found.items()
    ]
    return [
        Heading("Wording of labels", 3),
        Paragraph("The same weights, texts and labels; only the words that describe the labels differ."),
        Table(["wording", "accuracy", "NLL", "probability of the right label"], rows),
    ]


def _confusions(pairs: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        ["label", "answered instead", "messages", "share of the label's"],
        [[pair["label"], pair["predicted"], str(pair["examples"]), f"{pair['share']:.1%}"] for pair in pairs],
        words=2,
    )


def _classes(classes: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        [score["label"], str(score["examples"]), *(f"{score[key]:.3f}" for key in ("precision", "recall", "f1"))]
        for score in sorted(classes, key=lambda score: float(score["f1"]))
    ]
    return Table(["label", "messages", "precision", "recall", "F1"], rows)


def _cost(cost: Mapping[str, Any]) -> list[Block]:
    memory = "unknown" if cost["peak_memory_bytes"] is None else f"{cost['peak_memory_bytes'] / 2**20:,.0f} MiB"
    on_device = cost["peak_device_bytes"]
    return [
        Items(
            [
                f"{cost['texts_per_s']:,.1f} texts a second: {cost['texts']} texts against {cost['labels']} labels in "
                f"one call on {cost['device']}, {cost['threads']} threads; one measurement, on a machine that may have "
                "done other things too.",
                f"Peak memory of the process, encoder included: {memory}."
                + ("" if on_device is None else f" Of the GPU: {on_device / 2**20:,.0f} MiB."),
                f"Head: {cost['head_parameters']:,} parameters, {cost['head_bytes'] / 1e6:.2f} MB on disk.",
            ]
        )
    ]


def _summary(summary: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    for split, rows in summary.items():
        blocks += [
            Heading(f"{split}: mean and standard deviation over runs"),
            Table(
                ["", "runs", *(COLUMNS[key] for key in INTERVALS)],
                [
                    [
                        name,
                        str(figures["accuracy"]["runs"]),
                        *(f"{figures[key]['mean']:.3f} ± {figures[key]['sd']:.3f}" for key in INTERVALS),
                    ]
                    for name, figures in rows.items()
                ],
            ),
        ]
    return blocks
