"""Does a recipe hold where it never was? Heads trained without a domain, or without some labels, and measured there.

`python -m tokenalign.training.studies domains` leaves out one domain of CLINC150 after the other, `… labels` fifteen
labels of Banking77, for several seeds; both leave a head and a line of figures for each.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from tokenalign.classifier import TokenAlignClassifier
from tokenalign.config import CONFIG_FILE, fingerprint_of
from tokenalign.errors import TokenAlignError
from tokenalign.evaluation import accuracy
from tokenalign.training.baselines import CosineBaseline
from tokenalign.training.data import (
    BANKING_DOMAINS,
    Corpus,
    Example,
    label_words,
    normalised,
    read_banking77,
    read_clinc150,
    read_clinc150_domains,
)
from tokenalign.training.encoder import MINILM, Encoder, load_encoder
from tokenalign.training.held_out import TestSet
from tokenalign.training.material import PUBLIC_SOURCES, Sources, material_of
from tokenalign.training.meaning import answers, erasure
from tokenalign.training.recipes import BANKING_TEMPLATE, RECIPES, Recipe, recipe_named
from tokenalign.training.run import provenance_of, save_run
from tokenalign.training.sources import ensure_files
from tokenalign.training.splits import Split, make_split
from tokenalign.training.trainer import train_head

BASELINES = {
    "names": "{label}",
    "banking sentence": BANKING_TEMPLATE,
    "sentence": "This text is about {label}.",
}
SPLIT_SEEDS = (11, 12, 13, 14, 15)  # none of those that were looked at while the recipe was chosen
ERASURE_TEXTS = 100

OnLine = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class LeftOut:
    """One head of a study.

    name: of what it never sees, and of its folder; split: what it is trained and validated on; test: what it never sees
    """

    name: str
    split: Split
    test: TestSet


@dataclass(frozen=True, slots=True)
class Finding:
    """How one head did on what it never saw.

    accuracy: of the head; baselines: of cosines of mean-pooled vectors, by what labels are put into
    gap, erasure_ratio: of its matches, see `meaning`; no ratio where no text could be tested
    """

    name: str
    messages: int
    labels: int
    accuracy: float
    baselines: dict[str, float]
    gap: float
    erasure_ratio: float | None

    @property
    def lead(self) -> float:
        """Accuracy above the best of the baselines, as a share."""
        return self.accuracy - max(self.baselines.values())


@dataclass(frozen=True, slots=True, eq=False)
class StudyData:
    """Both data sets, whole."""

    banking77: Corpus
    clinc150: Corpus

    @classmethod
    def read(cls, data_dir: Path, *, sources: Sources = PUBLIC_SOURCES, local_only: bool = False) -> "StudyData":
        """The data sets in `data_dir`, downloaded where they are missing, unless local_only."""
        banking77 = read_banking77(ensure_files(sources.banking77, data_dir, local_only=local_only))
        folder = ensure_files(sources.clinc150, data_dir, local_only=local_only)
        return cls(banking77, read_clinc150(folder, read_clinc150_domains(folder)))

    def without(self, *domains: str) -> Corpus:
        """CLINC150 without some of its domains."""
        return self.clinc150.of_labels(
            [name for name, domain in self.clinc150.domains.items() if domain not in domains]
        )


def without_domains(data: StudyData, recipe: Recipe, seed: int) -> Iterator[LeftOut]:
    """For each domain of CLINC150: training without it, and its test messages with its own intents as candidates.

    Where the domain is one of banking, Banking77 is not trained on either.
    """
    for domain in dict.fromkeys(data.clinc150.domains.values()):
        labels = [name for name, of in data.clinc150.domains.items() if of == domain]
        tested = data.clinc150.of_labels(labels).examples["test"]
        split = make_split(data.banking77, seed, recipe.label_groups, data.without(domain))
        if domain in BANKING_DOMAINS:
            split = replace(split, partitions={**split.partitions, "train": ()})
        yield LeftOut(domain, _apart_from(split, tested), TestSet.of(tested, labels))


def without_labels(data: StudyData, recipe: Recipe, seeds: Sequence[int]) -> Iterator[LeftOut]:
    """For each seed: training without Banking77's test labels and without the banking domains, and those labels."""
    for seed in seeds:
        split = make_split(data.banking77, seed, recipe.label_groups, data.without(*BANKING_DOMAINS))
        yield LeftOut(f"seed-{seed}", split, TestSet.of(split.unseen_test, split.test_labels))


def _apart_from(split: Split, tested: Sequence[Example]) -> Split:
    """The split with `tested` as its test, and nothing in training that reads like one of its texts or labels."""
    texts = {normalised(example.text) for example in tested}
    labels = {normalised(label_words(example.label)) for example in tested}

    def apart(example: Example) -> bool:
        return normalised(example.text) not in texts and normalised(label_words(example.label)) not in labels

    kept = {name: tuple(filter(apart, split.partitions[name])) for name in ("train", "train_extra")}
    return replace(split, partitions={**split.partitions, **kept, "test": tuple(tested)})


def train(
    left_out: LeftOut, recipe: Recipe, data: StudyData, encoder: Encoder, output: Path, feature_dir: Path
) -> Path:
    """The folder below `output` with the head, which is trained unless it is there already."""
    folder = output / left_out.name
    if (folder / CONFIG_FILE).exists():
        return folder
    corpora = {"banking77": data.banking77, "clinc150": data.clinc150}
    facts = {"never_trained_on": left_out.name}
    material = material_of(recipe, encoder, corpora, left_out.split, facts, feature_dir=feature_dir)
    seed = left_out.split.seed
    provenance = provenance_of(recipe, seed, encoder, material)
    folder.mkdir(parents=True, exist_ok=True)
    trained = train_head(
        recipe,
        seed,
        encoder.config,
        material,
        device=encoder.backbone.device,
        folder=folder,
        run=fingerprint_of(provenance),
    )
    save_run(folder, encoder.config, material, provenance, trained)
    return folder


def measure(folder: Path, left_out: LeftOut, encoder: Encoder, *, erasure_texts: int = ERASURE_TEXTS) -> Finding:
    """How the head in `folder` does on what it never saw; erasure_texts of 0 leave the erasure out."""
    classifier = TokenAlignClassifier.from_pretrained(folder, device=encoder.backbone.device.type)
    test = left_out.test
    found = answers(classifier, test.texts, test.labels)
    baselines = {}
    for name, template in BASELINES.items():
        cosine = CosineBaseline(encoder.backbone, encoder.folder, encoder.config, template)
        baselines[name] = accuracy(cosine.logits(test.texts, test.labels).argmax(axis=1), test.targets)
    seed = left_out.split.seed
    deleted = erasure(classifier, test.texts, test.labels, sample=erasure_texts, seed=seed) if erasure_texts else None
    return Finding(
        left_out.name,
        len(test.texts),
        len(test.labels.names),
        accuracy(found.logits.argmax(axis=1), test.targets),
        baselines,
        float(found.gaps.mean()),
        None if deleted is None or not np.isfinite(deleted.ratio) else deleted.ratio,
    )


def table(findings: Sequence[Finding]) -> str:
    """The findings as a Markdown table, their means in the last line."""
    columns = ["never trained on", "messages", "head", *(f"cosine, {name}" for name in BASELINES)]
    columns += ["above the best", "gap", "erasure"]
    rows = [
        [finding.name, f"{finding.messages:,}", *_figures(finding), _ratio([finding.erasure_ratio])]
        for finding in findings
    ]
    means = np.mean([_numbers(finding) for finding in findings], axis=0).tolist()
    rows.append(["mean", "", *_shown(means), _ratio([finding.erasure_ratio for finding in findings])])
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _numbers(finding: Finding) -> list[float]:
    return [finding.accuracy, *(finding.baselines[name] for name in BASELINES), finding.lead, finding.gap]


def _shown(numbers: Sequence[float]) -> list[str]:
    *accuracies, lead, gap = numbers
    return [*(f"{number:.3f}" for number in accuracies), f"{lead:+.3f}", f"{gap:.3f}"]


def _figures(finding: Finding) -> list[str]:
    return _shown(_numbers(finding))


def _ratio(ratios: Sequence[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio is not None]
    return f"{np.mean(known):.1f}" if known else "–"


def main(arguments: Sequence[str] | None = None, *, on_line: OnLine = print) -> int:
    """0 after every head of the study was trained and measured; its JSON lies beside the heads."""
    parser = argparse.ArgumentParser(prog="python -m tokenalign.training.studies", description=__doc__)
    parser.add_argument("study", choices=["domains", "labels"])
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="transfer", help="default: transfer")
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with banking77/ and clinc150/")
    parser.add_argument("--output", type=Path, required=True, help="folder for the heads; those in it are kept")
    parser.add_argument("--feature-dir", type=Path, required=True, help="folder for token states")
    parser.add_argument("--seed", type=int, default=42, help="of the heads without a domain (default: 42)")
    options = parser.parse_args(arguments)
    recipe, findings = recipe_named(options.recipe), []
    try:
        data = StudyData.read(options.data_dir)
        encoder = load_encoder(MINILM, name="study", label_template=recipe.label_template)
        if options.study == "domains":
            cases = without_domains(data, recipe, options.seed)
        else:
            cases = without_labels(data, recipe, SPLIT_SEEDS)
        for case in cases:
            folder = train(case, recipe, data, encoder, options.output, options.feature_dir)
            findings.append(measure(folder, case, encoder))
            on_line(json.dumps(asdict(findings[-1])))
    except TokenAlignError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    report = [asdict(finding) for finding in findings]
    (options.output / f"{options.study}.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    on_line(table(findings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
