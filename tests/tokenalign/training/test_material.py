"""What a run trains on, as prepared from the data sets."""

from pathlib import Path

import pytest

from tokenalign.training.encoder import Encoder
from tokenalign.training.material import Sources, prepare
from tokenalign.training.recipes import Recipe


@pytest.mark.parametrize("name", ["everything", "comparison"])
def test_pools(
    name: str,
    request: pytest.FixtureRequest,
    encoder: Encoder,
    small_data: Path,
    small_sources: Sources,
    feature_dir: Path,
) -> None:
    """Episodes draw from Banking77, by its weight, and from each domain of CLINC150; else a source is a pool."""
    recipe: Recipe = request.getfixturevalue(name)
    material = prepare(recipe, 42, encoder, data_dir=small_data, feature_dir=feature_dir, sources=small_sources)
    banking77, *others = [{material.labels[label] for label in pool.messages} for pool in material.pools]
    assert banking77 == set(material.split.train_labels)
    domains = [{"book_flight", "lost_bag"}, {"play_song", "set_alarm"}]
    assert others == (domains if recipe.episodes else [domains[0] | domains[1]])
    assert [pool.weight for pool in material.pools] == [recipe.banking77_weight, *(1.0 for _ in others)]
