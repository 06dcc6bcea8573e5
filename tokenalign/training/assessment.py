"""Trained heads on their test splits, beside the baselines: one report of all figures."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenalign.classifier import TokenAlignClassifier
from tokenalign.errors import InputError, TokenAlignError
from tokenalign.evaluation import FloatArray, confusions, evaluate, reliability, softmax_at
from tokenalign.references import resolve_backbone
from tokenalign.training.baselines import LABEL_WORDINGS, OWN_LABEL_WORDINGS, RAW, CosineBaseline
from tokenalign.training.calibration import fit_temperature
from tokenalign.training.cost import measure_cost
from tokenalign.training.held_out import ERASURE_TEXTS, SPLITS, WHAT, AssessOptions, HeldOut, TestSet, held_out
from tokenalign.training.meaning import Answers, answers, erasure
from tokenalign.training.out_of_scope import answered_share, detections
from tokenalign.training.resampling import FIGURES, Counts, bootstrap_intervals, compare, draw_counts
from tokenalign.training.rivals import SLOW_TEXTS, Entailment, Gliclass, Rival, WordRegression
from tokenalign.training.splits import describe
from tokenalign.training.wording_study import read_wordings, study_wordings
from tokenalign.weights import load_head, locate_head

__all__ = ["ERASURE_TEXTS", "SPLITS", "AssessOptions", "TestSet", "assess", "assess_all"]

WORDS, NLI, GLICLASS = "TF-IDF and logistic regression", "entailment (NLI)", "GLiClass"
COSINE_TEMPERATURE = 0.05  # where there is nothing to fit one on: sentence-transformers' usual scale of 20
WORST_PAIRS = 10

OnStep = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Fielded:
    """A rival with its temperature; texts: how many it is measured on at most, None for all."""

    rival: Rival
    temperature: float
    texts: int | None = None


def assess_all(
    models: Sequence[str | None], options: AssessOptions, *, on_step: OnStep | None = None
) -> dict[str, Any]:
    """The report on one head; of several a list of them as `runs`, and `summary`: means and standard deviations.

    Several heads are of one recipe and several seeds, each measured on the splits of its own seed.
    """
    reports = [assess(replace(options, model=model), on_step=on_step) for model in models]
    return reports[0] if len(reports) == 1 else {"runs": reports, "summary": summary_of(reports)}


def summary_of(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Split -> model or baseline -> figure -> mean and sample standard deviation over the reports that have it."""
    found: dict[str, Any] = {}
    for split in dict.fromkeys(name for report in reports for name in report["results"]):
        results = [report["results"][split] for report in reports if split in report["results"]]
        rows = {"this head": [result["model"] for result in results]}
        for name in results[0]["baselines"]:
            rows[name] = [result["baselines"][name] for result in results if name in result["baselines"]]
        found[split] = {
            name: {figure: _mean_and_sd([row[figure] for row in of_name]) for figure in FIGURES}
            for name, of_name in rows.items()
        }
    return found


def assess(options: AssessOptions, *, on_step: OnStep | None = None) -> dict[str, Any]:
    """The report on one head: for each split its figures, those of the baselines, and what its matches mean.

    The baselines' temperature is fitted on the partition that calibrated the head, so their NLL, Brier and ECE compare.
    on_step is told what is being done. Raises `DataError` when the data isn't what the head was split by.
    """
    _need_scikit_learn()
    tell = on_step or (lambda what: None)
    tell("loading the model")
    head_options: dict[str, Any] = {"cache_dir": options.cache_dir, "local_files_only": options.local_only}
    base = locate_head(options.model, **head_options)
    held = held_out(load_head(base)[0], base, options)  # before the encoder is loaded, which takes seconds
    splits = tuple(dict.fromkeys(options.splits or held.splits))
    sets = {name: held.test_set(name) for name in splits}
    out_of_scope = held.out_of_scope()
    wordings = None if options.wordings is None else read_wordings(options.wordings)
    classifier = _load(options.model, options, head_options)
    others = {name: _load(name, options, head_options) for name in options.compare}
    config = classifier.config
    tell("calibrating the baselines")
    field, skipped = _field(classifier, resolve_backbone(config.backbone, base=base, **head_options), held)
    results: dict[str, Any] = {}
    for name, chosen in sets.items():
        tell(f"{name}: {len(chosen.texts):,} messages, {len(chosen.labels)} labels")
        seed = 0 if held.split is None else held.split.seed
        inside = answers(classifier, chosen.texts, chosen.labels)
        result = _result(classifier, chosen, inside, field, others, options, seed)
        results[name] = {"what": WHAT[name], **result}
        results[name]["skipped"] |= skipped
        if out_of_scope:
            tell(f"{name}: {len(out_of_scope):,} messages out of scope")
            results[name]["out_of_scope"] = _out_of_scope(classifier, inside, field[RAW], chosen, out_of_scope)
        if wordings is not None:
            tell(f"{name}: wordings of labels")
            results[name]["wordings"] = study_wordings(classifier, chosen, wordings)
    report: dict[str, Any] = {
        "model": {
            "name": config.name,
            "fingerprint": classifier.fingerprint,
            "temperature": config.temperature,
            "multi_label": None if config.multi_label is None else config.multi_label.model_dump(),
            "abstention": None if config.abstention is None else config.abstention.model_dump(),
        },
        "baseline_temperatures": {name: fielded.temperature for name, fielded in field.items()},
        "split": None if held.split is None else describe(held.split),
        "trained_on": held.trained_on,
        "results": results,
    }
    if options.cost:
        tell("cost")
        chosen = next(iter(sets.values()))
        report["cost"] = measure_cost(classifier, base, chosen.texts, chosen.labels).as_dict()
    return report


def _need_scikit_learn() -> None:
    if importlib.util.find_spec("sklearn") is None:
        raise InputError("scikit-learn is not installed, which evaluation needs; run: pip install 'tokenalign[train]'")


def _load(model: str | None, options: AssessOptions, head_options: dict[str, Any]) -> TokenAlignClassifier:
    return TokenAlignClassifier.from_pretrained(
        model, backbone=options.backbone, device=options.device, dtype=options.dtype, **head_options
    )


def _field(classifier: TokenAlignClassifier, folder: Path, held: HeldOut) -> tuple[dict[str, _Fielded], dict[str, str]]:
    """(what the head is measured beside, by name; what it can't be measured beside, and why)."""
    options, calibration = held.options, held.calibration
    device = str(classifier.backbone.device)
    field: dict[str, _Fielded] = {}
    skipped: dict[str, str] = {}
    for name, template in (LABEL_WORDINGS if held.own is None else OWN_LABEL_WORDINGS).items():
        cosine = CosineBaseline(classifier.backbone, folder, classifier.config, template)
        field[name] = _fielded(cosine, calibration, COSINE_TEMPERATURE)
    if held.training:
        words = WordRegression(held.training)
        known = calibration if calibration is not None and words.knows(calibration.labels) else None
        field[WORDS] = _fielded(words, known, 1.0)
    else:
        skipped[WORDS] = "the messages that the head was trained on aren't at hand"
    slow: dict[str, tuple[Path | None, Callable[..., Rival]]] = {
        NLI: (options.nli, Entailment),
        GLICLASS: (options.gliclass, Gliclass),
    }
    for name, (weights, load) in slow.items():
        if weights is None:
            skipped[name] = "no weights were given"
            continue
        try:
            field[name] = _fielded(load(weights, device=device), calibration, 1.0, SLOW_TEXTS)
        except TokenAlignError as error:
            skipped[name] = str(error)
    return field, skipped


def _fielded(rival: Rival, calibration: TestSet | None, default: float, texts: int | None = None) -> _Fielded:
    """The rival with the temperature that fits the calibration messages best, near `default` where they say little."""
    if calibration is None:
        return _Fielded(rival, default, texts)
    rows = _rows(len(calibration.texts), texts)
    logits = rival.logits([calibration.texts[i] for i in rows], calibration.labels)
    return _Fielded(rival, fit_temperature(logits, calibration.targets[rows], default), texts)


def _rows(count: int, limit: int | None) -> NDArray[np.int64]:
    """All rows, or a sample of `limit` of them that is always the same."""
    rows = np.arange(count)
    return rows if limit is None or limit >= count else np.sort(np.random.default_rng(0).permutation(count)[:limit])


def _result(
    classifier: TokenAlignClassifier,
    chosen: TestSet,
    found: Answers,
    field: Mapping[str, _Fielded],
    others: Mapping[str, TokenAlignClassifier],
    options: AssessOptions,
    seed: int,
) -> dict[str, Any]:
    """One split's figures of the head, the baselines and the other heads, and the comparisons with each of them."""
    head = softmax_at(found.logits, 1.0)
    counts = draw_counts(len(chosen.texts), resamples=options.resamples, seed=seed) if options.resamples else None
    result: dict[str, Any] = {
        "model": _figures(head, chosen.targets, chosen.labels.names, counts),
        "baselines": {},
        "others": {},
        "comparisons": {},
        "skipped": {},
        "matches": {"gap": float(found.gaps.mean())} | _erasure(classifier, chosen, options, seed),
    }

    def add(kind: str, name: str, probabilities: FloatArray, rows: NDArray[np.int64]) -> None:
        some = (
            counts
            if counts is None or len(rows) == len(chosen.texts)
            else draw_counts(len(rows), resamples=options.resamples, seed=seed)
        )
        targets = chosen.targets[rows]
        result[kind][name] = _figures(probabilities, targets, chosen.labels.names, some)
        if some is not None:
            result["comparisons"][name] = compare(head[rows], probabilities, targets, some).as_dict()

    for name, fielded in field.items():
        if isinstance(fielded.rival, WordRegression) and not fielded.rival.knows(chosen.labels):
            result["skipped"][name] = "it was not trained on these labels"
            continue
        rows = _rows(len(chosen.texts), fielded.texts)
        logits = fielded.rival.logits([chosen.texts[i] for i in rows], chosen.labels)
        add("baselines", name, softmax_at(logits, fielded.temperature), rows)
    for name, other in others.items():
        logits = answers(other, chosen.texts, chosen.labels).logits
        add("others", name, softmax_at(logits, 1.0), _rows(len(chosen.texts), None))
        trained = set(other.config.provenance.get("split", {}).get("train_labels", ()))
        result["others"][name]["trained_labels"] = len(trained & set(chosen.labels.names))
    return result


def _figures(
    probabilities: FloatArray, targets: NDArray[np.int64], labels: tuple[str, ...], counts: Counts | None
) -> dict[str, Any]:
    figures = evaluate(probabilities, targets, labels).as_dict()
    figures["intervals"] = {} if counts is None else bootstrap_intervals(probabilities, targets, counts)
    figures["reliability"] = [asdict(bin_) for bin_ in reliability(probabilities, targets)]
    worst = confusions(probabilities.argmax(axis=1), targets, labels, WORST_PAIRS)
    figures["confusions"] = [asdict(confusion) for confusion in worst]
    return figures


def _out_of_scope(
    classifier: TokenAlignClassifier, found: Answers, cosine: _Fielded, chosen: TestSet, texts: Sequence[str]
) -> dict[str, Any]:
    """How the head, and the cosine of label names, tell the split's messages from texts that no label fits."""
    inside = found.logits
    outside = answers(classifier, texts, chosen.labels).logits
    cosines = [cosine.rival.logits(some, chosen.labels) / cosine.temperature for some in (chosen.texts, texts)]
    result: dict[str, Any] = {
        "texts": len(texts),
        "model": {name: asdict(one) for name, one in detections(inside, outside).items()},
        RAW: {name: asdict(one) for name, one in detections(*cosines).items()},
    }
    if (fitted := classifier.config.abstention) is not None:
        result["abstention"] = {
            "min_score": fitted.min_score,
            "labels": fitted.labels,
            "in_scope_answered": answered_share(inside, fitted.min_score),
            "out_of_scope_answered": answered_share(outside, fitted.min_score),
        }
    return result


def _erasure(classifier: TokenAlignClassifier, chosen: TestSet, options: AssessOptions, seed: int) -> dict[str, Any]:
    if options.erasure_texts == 0:
        return {}
    found = erasure(classifier, chosen.texts, chosen.labels, sample=options.erasure_texts, seed=seed)
    return {"erasure": None if found is None else found.as_dict()}


def _mean_and_sd(values: Sequence[float]) -> dict[str, float | int]:
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return {"mean": float(np.mean(values)), "sd": sd, "runs": len(values)}
