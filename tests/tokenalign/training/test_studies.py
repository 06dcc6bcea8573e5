"""Heads that are measured on what they never saw."""

from dataclasses import replace
from pathlib import Path

import pytest

from tokenalign.training.encoder import Encoder
from tokenalign.training.material import Sources
from tokenalign.training.recipes import Recipe
from tokenalign.training.splits import partition_hashes
from tokenalign.training.studies import (
    BASELINES,
    Finding,
    StudyData,
    measure,
    table,
    train,
    without_domains,
    without_labels,
)


@pytest.fixture(scope="module")
def data(small_data: Path, small_sources: Sources) -> StudyData:
    """Eight labels of banking, and six intents in three domains, one of them banking."""
    return StudyData.read(small_data, sources=small_sources, local_only=True)


def test_a_domain_is_left_out_of_training(data: StudyData, everything: Recipe) -> None:
    """Nothing of the domain trains, its own intents are the candidates, and banking leaves Banking77 out as well."""
    cases = {case.name: case for case in without_domains(data, everything, 42)}
    assert list(cases) == ["travel", "home", "banking"]
    for domain, case in cases.items():
        tested = {label for label, of in data.clinc150.domains.items() if of == domain}
        trained = {example.label for example in case.split.partitions["train_extra"]}
        assert trained == data.clinc150.domains.keys() - tested
        assert set(case.test.labels.names) == tested
        assert len(case.test.texts) == 8
        assert bool(case.split.partitions["train"]) == (domain != "banking")


def test_texts_and_labels_of_the_test_never_train(data: StudyData, everything: Recipe) -> None:
    """A training message that reads like a tested one is left out, and so is a label that reads like a tested one."""
    twin, namesake = data.clinc150.examples["test"][0], data.banking77.labels[0]
    assert data.clinc150.domains[twin.label] == "travel"
    messages = [replace(example, text=twin.text.upper()) for example in data.banking77.examples["train"][:1]]
    banking77 = replace(
        data.banking77, examples={**data.banking77.examples, "train": (*messages, *data.banking77.examples["train"])}
    )
    tested = replace(twin, label=namesake.replace("_", " "))
    clinc150 = replace(
        data.clinc150,
        labels=(*data.clinc150.labels, tested.label),
        examples={**data.clinc150.examples, "test": (*data.clinc150.examples["test"], tested)},
        domains={**data.clinc150.domains, tested.label: "travel"},
    )
    recipe = replace(everything, label_groups=(4, 2, 2))
    trained: set[str] = set()
    for seed in range(5):  # splits in which the namesake trains, or not
        case = next(without_domains(StudyData(banking77, clinc150), recipe, seed))
        examples = case.split.partitions["train"]
        trained |= {example.label for example in examples}
        assert twin.text not in {example.text.lower() for example in examples}
    assert trained == set(data.banking77.labels) - {namesake}


def test_labels_are_left_out_of_training(data: StudyData, everything: Recipe) -> None:
    """The test labels of each seed don't train, nor do the banking domains, and their test messages are measured."""
    cases = list(without_labels(data, everything, [1, 2]))
    assert [case.name for case in cases] == ["seed-1", "seed-2"]
    assert partition_hashes(cases[0].split)["train"] != partition_hashes(cases[1].split)["train"]
    for case in cases:
        trained = {example.label for name in ("train", "train_extra") for example in case.split.partitions[name]}
        assert not trained & {*case.test.labels.names, "pay_bill", "new_pin"}
        assert len(case.test.labels.names) == 2
        assert len(case.test.texts) == 6


def test_a_head_is_trained_once_and_measured(
    data: StudyData, everything: Recipe, encoder: Encoder, feature_dir: Path, tmp_path: Path
) -> None:
    """The head lies in its folder, a second call leaves it as it is, and the figures are those of its own answers."""
    case = next(without_domains(data, replace(everything, max_epochs=1), 42))
    folder = train(case, everything, data, encoder, tmp_path, feature_dir)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert train(case, everything, data, encoder, tmp_path, feature_dir) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    finding = measure(folder, case, encoder, erasure_texts=4)
    assert (finding.name, finding.messages, finding.labels) == ("travel", 8, 2)
    assert finding.baselines.keys() == BASELINES.keys()
    assert finding.accuracy * 8 == pytest.approx(round(finding.accuracy * 8))
    assert finding.gap >= 0
    assert measure(folder, case, encoder, erasure_texts=0).erasure_ratio is None


def test_the_table_ends_with_means() -> None:
    """A line for each head, its lead over the best baseline signed, and the means of all; unknown ratios left out."""
    findings = [
        Finding("home", 450, 15, 0.75, dict.fromkeys(BASELINES, 0.5) | {"names": 0.7}, 0.2, 3.0),
        Finding("work", 1_450, 15, 0.65, dict.fromkeys(BASELINES, 0.5) | {"names": 0.7}, 0.1, None),
    ]
    lines = table(findings).splitlines()
    assert lines[2] == "| home | 450 | 0.750 | 0.700 | 0.500 | 0.500 | +0.050 | 0.200 | 3.0 |"
    assert lines[3] == "| work | 1,450 | 0.650 | 0.700 | 0.500 | 0.500 | -0.050 | 0.100 | – |"
    assert lines[4] == "| mean |  | 0.700 | 0.700 | 0.500 | 0.500 | +0.000 | 0.150 | 3.0 |"
