"""Random numbers are a function of their name."""

import numpy as np

from mpp.runtime.randomness import Stream, random_words


def test_words_are_philoxs_and_depend_on_every_part_of_the_name():
    name = (Stream.CROP, 7, 11, 13)
    reference = np.random.Philox(key=[7, 0], counter=[0, 11, 13, Stream.CROP]).random_raw(5)
    assert (random_words(*name, 5) == reference).all()
    assert (random_words(*name, 3) == reference[:3]).all()
    for part in range(4):
        other = [number + (place == part) for place, number in enumerate(name)]
        assert (random_words(*other, 5) != reference).all()
