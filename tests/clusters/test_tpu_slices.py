"""How many hosts, chips and devices a topology of TPUs has."""

import pytest

from jaxtrain.submit.tpu_slices import KINDS, tpu_slice


@pytest.mark.parametrize(
    ("text", "hosts", "found"),
    [
        # (hosts, chips per host, devices), as in the sources of tpu_slices.py
        ("v4/2x2x2", None, (2, 4, 8)),
        ("v5e/1x1", None, (1, 1, 1)),
        ("v5e/2x4", None, (1, 8, 8)),
        ("v5e/2x4", 2, (2, 4, 8)),
        ("v5e/4x4", 4, (4, 4, 16)),
        ("v5e/8x8", None, (16, 4, 64)),
        ("v5p/2x2x1", None, (1, 4, 4)),
        ("v5p/8x8x8", None, (128, 4, 512)),
        ("v6e/16x16", None, (64, 4, 256)),
        ("v7x/2x2x1", None, (1, 4, 8)),
        ("v7x/4x4x4", None, (16, 4, 128)),
    ],
    ids=str,
)
def test_hosts_of_a_topology(text, hosts, found):
    one = tpu_slice(text, hosts=hosts)
    assert (one.hosts, one.chips_per_host, one.num_devices) == found
    assert one.accelerator == KINDS[text.partition("/")[0]].label
