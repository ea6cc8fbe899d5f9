"""The endless order: permutations by arithmetic."""

import numpy as np
import pytest

from jaxtrain.data.permutation import permuted


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 64, 65, 1000, 4096, 4097])
@pytest.mark.parametrize("first_epoch", [0, 10**9])
def test_every_epoch_holds_every_row_once(num_rows, first_epoch):
    positions = np.arange(first_epoch * num_rows, (first_epoch + 3) * num_rows)
    for epoch in permuted(positions, num_rows=num_rows, seed=7).reshape(3, num_rows):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(num_rows))


def test_positions_are_independent_of_each_other():
    whole = permuted(np.arange(500), num_rows=100, seed=1)
    assert whole.tolist() == [int(permuted(np.array([p]), num_rows=100, seed=1)[0]) for p in range(500)]


def test_seeds_and_epochs_give_different_orders():
    orders = {
        tuple(epoch)
        for seed in (0, 1, 2, 2**40, -1)
        for epoch in permuted(np.arange(300), num_rows=100, seed=seed).reshape(3, 100).tolist()
    }
    assert len(orders) == 15


def test_the_order_is_part_of_the_contract():
    """A run resumed by a later version must see the rows it would have seen."""
    assert permuted(np.arange(10), num_rows=10, seed=0).tolist() == [9, 2, 5, 6, 3, 8, 4, 1, 0, 7]


@pytest.mark.parametrize("num_rows", [5, 33, 200])
def test_each_row_is_as_likely_at_each_place(num_rows):
    epochs = 4000
    rows = permuted(np.arange(epochs * num_rows), num_rows=num_rows, seed=3).reshape(epochs, num_rows)
    for place in (0, num_rows // 2, num_rows - 1):
        counts = np.bincount(rows[:, place], minlength=num_rows)
        chi_squared = float(((counts - epochs / num_rows) ** 2 / (epochs / num_rows)).sum())
        # Mean num_rows - 1, deviation sqrt(2 (num_rows - 1)); six deviations happen by chance once in 10^6 or less.
        assert chi_squared < num_rows - 1 + 6 * np.sqrt(2 * (num_rows - 1)) + 6
    # Neighbours stay neighbours as rarely as in a random permutation: once in an epoch, on average.
    kept = float((np.diff(rows, axis=1) == 1).sum(axis=1).mean())
    assert kept == pytest.approx(1 - 1 / num_rows, abs=0.1)
