"""Masks are those of the paper, never touch special tokens, and depend on seed and row number alone."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxtrain.data import Batches, open_data
from jaxtrain.data.rows import SelectedRows

VOCABULARY = 256
MASK, FIRST_SPECIAL = 259, 256  # of synthetic tokens: [PAD] [CLS] [SEP] [MASK] above the ids of the data


def opened(corruption, *, seed=0, length=64, **more):
    config = {"kind": "synthetic", "num_rows": 2000, "vocab_size": VOCABULARY, "corruption": corruption, **more}
    return open_data(config, sequence_length=length, seed=seed)


@pytest.fixture(scope="module")
def masked():
    return opened({"kind": "mask"})


def binomial(count, chance):
    """Five standard deviations of a binomial fraction: a right draw fails one time in two million."""
    return 5 * np.sqrt(chance * (1 - chance) / count)


def test_fractions_of_masks(masked):
    plain = opened(None, length=62)
    rows, tokens = masked.train.gather(np.arange(2000)), plain.train.gather(np.arange(2000))["inputs"]
    seen, targets = rows["inputs"]["tokens"], rows["targets"]
    inner, chosen = seen[:, 1:-1], targets[:, 1:-1] >= 0
    # [CLS] first and [SEP] last, neither ever chosen.
    assert set(seen[:, 0]) == {257}
    assert set(seen[:, -1]) == {258}
    assert (targets[:, [0, -1]] == -100).all()
    np.testing.assert_array_equal(targets[:, 1:-1][chosen], tokens[chosen])
    np.testing.assert_array_equal(inner[~chosen], tokens[~chosen])
    assert abs(chosen.mean() - 0.15) < binomial(chosen.size, 0.15)
    count, is_mask, same = chosen.sum(), inner[chosen] == MASK, inner[chosen] == tokens[chosen]
    assert abs(is_mask.mean() - 0.8) < binomial(count, 0.8)
    # A random token is one time in 256 the token itself.
    unchanged = 0.1 + 0.1 / VOCABULARY
    assert abs(same.mean() - unchanged) < binomial(count, unchanged)
    random = inner[chosen][~is_mask & ~same]
    assert random.max() < FIRST_SPECIAL
    # Every position, and every id as a replacement, has its share: six deviations, of 62 and of 256 tries.
    assert abs(chosen.mean(axis=0) - 0.15).max() < binomial(2000, 0.15) * 6 / 5
    expected = len(random) / VOCABULARY
    assert abs(np.bincount(random, minlength=VOCABULARY) - expected).max() < 6 * np.sqrt(expected)


def test_what_is_hidden_depends_on_seed_row_and_epoch_alone(masked):
    rows, whole = masked.train, masked.train.gather(np.arange(40))
    some = rows.gather(np.array([7, 3]))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[[7, 3]], b), whole, some)
    again = rows.gather(np.arange(40) + len(rows))
    assert (whole["inputs"]["tokens"] != again["inputs"]["tokens"]).mean() > 0.05
    other = opened({"kind": "mask"}, seed=1)
    assert (other.train.gather(np.arange(40))["targets"] != whole["targets"]).mean() > 0.05
    # What is hidden for evaluation is the same in every run.
    np.testing.assert_array_equal(other.validation[3]["targets"], masked.validation[3]["targets"])


@pytest.mark.parametrize("shuffle", [True, False], ids=["train", "evaluate"])
def test_every_layout_and_start_holds_the_same_batch(masked, shuffle):
    rows = masked.train
    batches = Batches(SelectedRows(rows, np.arange(50)), 16, seed=3, shuffle=shuffle)
    spec = batches.spec()
    one = batches.load(3, dict.fromkeys(spec, SingleDeviceSharding(jax.devices()[0])))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "context"))
    # A process that begins here has loaded no batch before.
    fresh = Batches(SelectedRows(rows, np.arange(50)), 16, seed=3, shuffle=shuffle)
    many = fresh.load(3, dict.fromkeys(spec, NamedSharding(mesh, PartitionSpec("data"))))
    jax.tree.map(np.testing.assert_array_equal, one, many)
    # Rows of a part of the batch, as a process of two reads them.
    half = fresh._load_rows(3, np.arange(8, 16))
    jax.tree.map(lambda part, whole: np.testing.assert_array_equal(part, whole[8:]), half, one)
