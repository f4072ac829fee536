"""Random numbers are a function of their name."""

import numpy as np

from mpp.runtime.randomness import Stream, permutation, random_words, uniform


def test_words_are_philoxs_and_depend_on_every_part_of_the_name():
    name = (Stream.CROP, 7, 11, 13)
    reference = np.random.Philox(key=[7, 0], counter=[0, 11, 13, Stream.CROP]).random_raw(5)
    assert (random_words(*name, 5) == reference).all()
    assert (random_words(*name, 3) == reference[:3]).all()
    others = [
        (Stream.CORRUPTION, 7, 11, 13),
        (Stream.CROP, 8, 11, 13),
        (Stream.CROP, 7, 12, 13),
        (Stream.CROP, 7, 11, 14),
    ]
    assert all((random_words(*other, 5) != reference).all() for other in others)


def test_uniform_numbers_are_uniform():
    numbers = uniform(Stream.CROP, 0, 0, 0, 100_000)
    assert numbers.min() >= 0 and numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert ((counts - 5000) ** 2 / 5000).sum() < 44  # chi-squared, 19 degrees of freedom, p = 0.001


def test_each_epoch_is_another_permutation():
    orders = [permutation(Stream.ORDER, 0, epoch, 100) for epoch in range(3)]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
