"""Batch k is a pure function of (rows, seed, k) on any layout."""

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxtrain.data import Batches
from jaxtrain.data.permutation import Span, permuted
from jaxtrain.data.rows import ArrayRows, ConcatenatedRows, MappedRows, Rows
from jaxtrain.errors import DataError


def numbered(num_rows: int, *, width: int = 4) -> ArrayRows:
    """Row i holds i in every entry, so that a batch tells which rows it has."""
    column = np.arange(num_rows, dtype=np.int32)
    return ArrayRows({"inputs": np.repeat(column[:, None], width, axis=1), "targets": column})


def tokens(num_rows: int, *, width: int = 4) -> ArrayRows:
    inputs = np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)
    return ArrayRows({"inputs": inputs, "targets": inputs + 1})


def on_one_device(batches: Batches):
    return dict.fromkeys(batches.spec(), SingleDeviceSharding(jax.devices()[0]))


def row_numbers(batches: Batches, ks) -> list[int]:
    return [int(i) for k in ks for i in batches.load(k, on_one_device(batches))["targets"]]


def devices(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(shape), ("data", "context")[: len(shape)])


LAYOUTS = {
    "data=8": lambda: NamedSharding(devices(8), PartitionSpec("data")),
    "replicated": lambda: NamedSharding(devices(8), PartitionSpec()),
    "data=4, replicated over 2": lambda: NamedSharding(devices(4, 2), PartitionSpec("data")),
    "data=4 context=2": lambda: NamedSharding(devices(4, 2), PartitionSpec("data", "context")),
    "context=8": lambda: NamedSharding(devices(8), PartitionSpec(None, "data")),
}


@pytest.mark.parametrize("shuffle", [True, False], ids=["train", "evaluate"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_holds_the_same_batch(layout, shuffle):
    batches = Batches(tokens(50, width=8), 16, seed=3, shuffle=shuffle)
    one = batches.load(3, on_one_device(batches))
    many = batches.load(3, dict.fromkeys(batches.spec(), LAYOUTS[layout]()))
    again = batches.load(3, on_one_device(batches))
    assert one.keys() == many.keys() == batches.spec().keys()
    for name, value in one.items():
        assert many[name].sharding == LAYOUTS[layout]()
        assert (value.shape, value.dtype) == (batches.spec()[name].shape, batches.spec()[name].dtype)
        np.testing.assert_array_equal(value, many[name])
        np.testing.assert_array_equal(value, again[name])


@pytest.mark.parametrize("size", [1, 7, 33], ids="batch={}".format)
def test_an_epoch_is_a_permutation_and_the_next_another(size):
    batches = Batches(numbered(20), size, seed=0, shuffle=True)
    stream = row_numbers(batches, range(-(-60 // size)))[:60]
    epochs = [stream[start : start + 20] for start in (0, 20, 40)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != list(range(20))


def test_the_order_depends_on_the_seed_and_not_on_the_batch_size():
    stream = {
        (seed, size): row_numbers(Batches(numbered(24), size, seed=seed, shuffle=True), range(24 // size))
        for seed in (0, 1, 2**40)
        for size in (3, 8)
    }
    assert all(stream[seed, 3] == stream[seed, 8] for seed in (0, 1, 2**40))
    assert len({tuple(order) for order in stream.values()}) == 3


@pytest.mark.parametrize(
    ("make", "expected"),
    [(numbered, [[1, 1, 1, 1], [1, 1, 0, 0]]), (tokens, [[[1] * 4] * 4, [[1] * 4] * 2 + [[0] * 4] * 2])],
    ids=["examples", "tokens"],
)
def test_evaluation_is_in_order_and_weighs_the_filling_zero(make, expected):
    rows = make(6)
    batches = Batches(rows, 4, seed=0, shuffle=False)
    assert len(batches) == 2
    loaded = [batches.load(k, on_one_device(batches)) for k in range(2)]
    np.testing.assert_array_equal([batch["weights"] for batch in loaded], expected)
    assert loaded[0]["weights"].dtype == np.float32
    inputs = np.concatenate([batch["inputs"] for batch in loaded])
    np.testing.assert_array_equal(inputs, rows.gather(np.array([0, 1, 2, 3, 4, 5, 0, 0]))["inputs"])


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        (np.array([7, 3_000_000_000]), "targets of 3000000000, outside the range of int32"),
        (np.array([7, 1e300]), "targets of 1e[+]300, outside the range of float32"),
    ],
    ids=["int64", "float64"],
)
def test_numbers_that_32_bits_cannot_hold_are_refused(numbers, said):
    batches = Batches(ArrayRows({"targets": numbers}), 2, seed=0, shuffle=False)
    with pytest.raises(DataError, match=f"batch 0 holds {said}"):
        batches.load(0, on_one_device(batches))


def test_masked_values_are_refused():
    with pytest.raises(DataError, match="inputs holds masked values, not numbers"):
        ArrayRows({"inputs": np.ma.masked_equal([1.0, 2.0], 2.0)})


def _noisy(row, rng):
    return {**row, "inputs": row["inputs"] + rng.random(4)}


def test_random_transformations_are_pure_in_the_index_and_new_each_epoch():
    rows = numbered(6).random_map(_noisy, seed=1)
    assert not isinstance(rows, Rows)
    batches = {size: Batches(rows, size, seed=0, shuffle=True) for size in (3, 4)}
    stream = {
        size: np.concatenate([b.load(k, on_one_device(b))["inputs"] for k in range(12 // size)])
        for size, b in batches.items()
    }
    np.testing.assert_array_equal(stream[3], stream[4])
    spread = dict.fromkeys(batches[4].spec(), NamedSharding(devices(4, 2), PartitionSpec("data")))
    np.testing.assert_array_equal(batches[4].load(2, spread)["inputs"], stream[4][8:])
    assert len(np.unique(stream[4])) == stream[4].size


def test_a_plain_grain_dataset_gives_the_same_rows():
    plain = grain.MapDataset.range(20).map(lambda i: {"inputs": np.full(4, i, np.int32), "targets": np.int32(i)})
    assert row_numbers(Batches(plain, 8, seed=5, shuffle=True), range(5)) == row_numbers(
        Batches(numbered(20), 8, seed=5, shuffle=True), range(5)
    )


def test_a_mixture_takes_by_weight_and_covers_each_part():
    parts = [numbered(10), ArrayRows({name: c + 100 for name, c in numbered(30).gather(np.arange(30)).items()})]
    rows = ConcatenatedRows(parts, weights=[3.0, 1.0])
    assert [int(rows[i]["targets"]) for i in (0, 9, 10, 39)] == [0, 9, 100, 129]
    stream = np.array(row_numbers(Batches(rows, 8, seed=0, shuffle=True), range(15)))
    first, second = stream[stream < 100], stream[stream >= 100]
    assert (len(first), len(second)) == (90, 30)
    assert sorted(second) == list(range(100, 130))
    assert all(sorted(first[start : start + 10]) == list(range(10)) for start in range(0, 90, 10))
    assert stream.tolist() == row_numbers(Batches(rows, 8, seed=0, shuffle=True), range(15))


def test_each_pass_of_a_short_part_draws_other_random_numbers():
    mixture = ConcatenatedRows([numbered(2), numbered(30)], weights=[1.0, 1.0])
    batches = Batches(MappedRows(mixture, lambda found, indices: {"inputs": indices}), 32, seed=0, shuffle=True)
    indices = batches._load_rows(0, np.arange(32))["inputs"]
    assert len(set(indices)) == 32
    np.testing.assert_array_equal(indices % 32, batches.row_numbers(0))


@pytest.mark.parametrize("change", [lambda rows: rows.map(dict), lambda rows: rows[:5]], ids=["map", "slice"])
def test_a_transformation_that_loses_the_weights_is_an_error(change):
    mixture = ConcatenatedRows([numbered(10), numbered(30)], weights=[3.0, 1.0])
    with pytest.raises(DataError, match="loses the weights of a mixture"):
        Batches(change(mixture), 4, seed=0, shuffle=True)
    Batches(change(mixture), 4, seed=0, shuffle=False)
    Batches(change(ConcatenatedRows([numbered(10), numbered(30)])), 4, seed=0, shuffle=True)


@pytest.mark.parametrize(("tokens", "rows"), [(48, 2), (49, 3), (17, 1), (16, 0)])
def test_the_last_row_of_a_span_has_a_target_for_its_last_token(tokens, rows):
    assert Span(100, 100 + tokens).num_rows(16) == rows


FAR = {
    "float64": (1.7e9 + np.arange(50.0), True),
    "int64": (1_700_000_000 + np.arange(50), True),
    "int32": ((30_000_000 + np.arange(50)).astype(np.int32), True),
    "cents": (1e8 + np.arange(50) / 100, True),
    "months": (1.7e9 + 2.6e6 * np.arange(50), False),
    "one value": (np.full(50, 1.7e9 + 1), False),
    "labels": (np.arange(50), False),
}


@pytest.mark.parametrize("name", FAR)
def test_arrays_whose_differences_float32_loses_are_one_line(name):
    values, is_lost = FAR[name]
    inputs = np.random.default_rng(0).normal(size=(50, 3))
    if not is_lost:
        ArrayRows({"inputs": inputs, "targets": values})
        return
    with pytest.raises(DataError, match="whose differences float32 cannot hold; subtract a constant from them"):
        ArrayRows({"inputs": inputs, "targets": values})


def test_the_order_is_part_of_the_contract():
    """A run resumed by a later version must see the rows it would have seen."""
    assert permuted(np.arange(10), num_rows=10, seed=0).tolist() == [9, 2, 5, 6, 3, 8, 4, 1, 0, 7]
