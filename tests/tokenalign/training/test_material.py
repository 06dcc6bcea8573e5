"""What a run trains on, as prepared from the data sets."""

from tokenalign.training.material import Material


def test_pools(material: Material) -> None:
    """Messages are drawn from Banking77, by its weight, and from each domain of CLINC150."""
    banking77, *others = [{material.labels[label] for label in pool.messages} for pool in material.pools]
    assert banking77 == set(material.split.train_labels)
    assert others == [{"book_flight", "lost_bag"}, {"play_song", "set_alarm"}]
    assert [pool.weight for pool in material.pools] == [2.0, 1.0, 1.0]
