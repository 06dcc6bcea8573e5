"""A head that is there already gets its calibration for independent scores."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tokenalign.classifier import TokenAlignClassifier
from tokenalign.config import ModelConfig
from tokenalign.errors import InputError, TrainingError
from tokenalign.references import sha256_of
from tokenalign.training import recalibration
from tokenalign.training.assessment import AssessOptions
from tokenalign.training.recalibration import recalibrate
from tokenalign.training.recipes import Recipe
from tokenalign.training.run import RunOptions, run_training

RunOptionsFor = Callable[..., RunOptions]


@pytest.fixture
def trained(card_like: Recipe, run_options: RunOptionsFor) -> RunOptions:
    """The options of a run that is done."""
    options = run_options(replace(card_like, max_epochs=1))
    run_training(options)
    return options


def assess_options(options: RunOptions) -> AssessOptions:
    return AssessOptions(model=None, data_dir=options.data_dir, device="cpu", local_only=True, sources=options.sources)


def test_it_fits_what_training_fits(trained: RunOptions) -> None:
    """Taken out and fitted anew, scale and bias are those of the run; weights and temperature stay."""
    before = ModelConfig.load(trained.output / "config.json")
    assert before.multi_label is not None
    before.model_copy(update={"multi_label": None}).save(trained.output / "config.json")
    weights = sha256_of(trained.output / "model.safetensors")
    after = recalibrate(trained.output, assess_options(trained))
    assert after.multi_label is not None
    # The run's token states are kept in fp16.
    assert after.multi_label.scale == pytest.approx(before.multi_label.scale, rel=0.05)
    assert after.multi_label.bias == pytest.approx(before.multi_label.bias, abs=0.1)
    assert after.temperature == before.temperature
    assert sha256_of(trained.output / "model.safetensors") == weights
    assert ModelConfig.load(trained.output / "config.json") == after
    classifier = TokenAlignClassifier.from_pretrained(trained.output, device="cpu")
    assert 0 < classifier("my card was declined", ["card declined"], multi_label=True)["score"] < 1


def test_a_folder_without_a_head(tmp_path: Path) -> None:
    """The folder is named."""
    with pytest.raises(InputError, match=r"no config\.json") as caught:
        recalibrate(tmp_path, AssessOptions(model=None, data_dir=tmp_path))
    assert caught.value.loc == ("folder",)


def test_logits_that_tell_nothing(trained: RunOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head without a use gets no calibration, and its config.json stays as it was."""
    monkeypatch.setattr(recalibration, "fit_multi_label", lambda logits, targets: None)
    before = (trained.output / "config.json").read_bytes()
    with pytest.raises(TrainingError, match="train the head further"):
        recalibration.recalibrate(trained.output, assess_options(trained))
    assert (trained.output / "config.json").read_bytes() == before
