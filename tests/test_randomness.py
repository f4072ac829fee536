"""Random numbers are a function of their name."""

import numpy as np

from mpp.runtime.randomness import FIXED_VIEW, Stream, permutation, random_words, uniform


def test_words_are_philoxs_and_depend_on_every_part_of_the_name():
    name = (Stream.CROP, 7, 11, 13)
    reference = np.random.Philox(key=[7, 0], counter=[0, 11, 13, Stream.CROP]).random_raw(5)
    assert (random_words(*name, 5) == reference).all()
    assert (random_words(*name, 3) == reference[:3]).all()
    for part in range(4):
        other = [number + (place == part) for place, number in enumerate(name)]
        assert (random_words(*other, 5) != reference).all()


def test_a_seed_means_the_same_numbers_for_ever():
    """Weights of published runs depend on each of these."""
    names = ["ORDER", "CROP", "CORRUPTION", "REPLACEMENT", "CUT", "MODEL", "BLOCK", "AUGMENT"]
    assert [(each.name, each.value) for each in Stream] == [(name, number) for number, name in enumerate(names)]
    assert FIXED_VIEW == 2**64 - 1
    words = np.random.Philox(key=[7, 0], counter=[0, 11, 0, Stream.ORDER]).random_raw(20)
    assert (permutation(Stream.ORDER, 7, 11, 20) == words.argsort(kind="stable")).all()
    assert (uniform(Stream.ORDER, 7, 11, 0, 20) == (words // 2048) / 2**53).all()
