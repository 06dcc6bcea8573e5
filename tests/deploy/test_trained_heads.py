"""A head of one's own, from training to the service."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenalign.config import BackboneReference, ModelConfig
from tokenalign.training.held_out import AssessOptions
from tokenalign.training.own_data import OwnFiles
from tokenalign.training.own_run import OWN_RECIPE
from tokenalign.training.recalibration import recalibrate
from tokenalign.training.run import RunOptions, run_training

LABELS = [f"{topic} declined" for topic in ("card", "cash", "payment", "loan", "rate", "fee")]


@pytest.fixture
def trained(bert_backbone: Path, tmp_path: Path) -> Path:
    """The folder of a head that was trained on a small file for some epochs, its calibrations taken out."""
    data = tmp_path / "mine.csv"
    rows = [f"{label} {chr(97 + i % 26)} {i},{label}" for label in LABELS for i in range(50)]
    data.write_text("\n".join(["text,label", *rows]) + "\n")
    options = RunOptions(
        recipe=replace(OWN_RECIPE, name="mine", max_epochs=4, learning_rate=3e-3),
        own=OwnFiles(data=data, split="messages"),
        output=tmp_path / "head",
        data_dir=tmp_path,
        feature_dir=tmp_path / "features",
        backbone=BackboneReference(reference=str(bert_backbone)),
        device="cpu",
        head_shape=(("width", 32), ("ffn_width", 64)),
    )
    config = run_training(options)
    bare = config.model_copy(update={"multi_label": None, "abstention": None})
    bare.save(options.output / "config.json")
    return options.output


async def test_the_limit_that_calibrate_writes_is_the_services(
    trained: Path, load_pair: Callable[..., Any], run_stack: Callable[..., Any], tmp_path: Path
) -> None:
    """Before, "calibrated" is refused; then a text below the fitted limit gets no label, and that limit is shown."""
    question: dict[str, Any] = {"texts": ["card declined a", "x"], "labels": LABELS, "min_score": "calibrated"}
    async with run_stack(load_pair(trained)) as stack:
        refused = await stack.post(**question)
    assert refused.status_code == 422
    assert "fit one with `tokenalign calibrate" in refused.json()["error"]
    fitted = recalibrate(
        trained, AssessOptions(model=None, data_dir=tmp_path, data=tmp_path / "mine.csv", device="cpu")
    )
    assert fitted.abstention is not None
    assert ModelConfig.load(trained / "config.json") == fitted
    pair = load_pair(trained)
    async with run_stack(pair) as stack:
        answer = await stack.ask(**question)
        plain = await stack.ask(**{**question, "min_score": None})
    for found, unasked in zip(answer["results"], plain["results"], strict=True):
        best = unasked["score"]
        if best >= fitted.abstention.min_score:
            assert found == unasked
        else:
            assert found["label"] is None
            assert found["abstained"]["limit"] == fitted.abstention.min_score
    assert [result["label"] for result in pair.classifier(question["texts"], LABELS, min_score="calibrated")] == [
        result["label"] for result in answer["results"]
    ]
    assert answer["results"][1]["label"] is None
