"""A slice of a parameter is the same from the part of a tensor that it needs as from the whole tensor."""

import numpy as np
import pytest

from jaxtrain.published.parts import part_of
from jaxtrain.published.transforms import (
    block,
    conv1d,
    convolution,
    copy,
    interleaved,
    linear,
    patches,
    reshaped,
    vector,
)

# Transform, and how much of theirs a middle slice of ours needs: all of what it does not need is left unread.
TRANSFORMS = {
    "copy": (copy(12, 10), 0.3),
    "vector": (vector(4, 6), 0.6),
    "linear to heads": (linear((12,), (4, 6)), 0.3),
    "linear from heads": (linear((4, 6), (12,)), 0.3),
    "conv1d": (conv1d((12,), (4, 6)), 0.5),
    "reshaped": (reshaped((1, 1, 12), (12,)), 0.6),
    "convolution": (convolution(8, 6, 3, 3), 0.3),
    "patches": (patches(8, 3, 4), 0.6),
    "one of q|k|v": (block(linear((12,), (4, 6)), dim=0, start=24, of=60), 0.2),
    "of each head": (interleaved((4, 3, 6), 1, (12,)), 0.3),
    "of each head, bias": (interleaved((4, 3, 6), 2), 0.6),
}


@pytest.mark.parametrize(("transform", "share"), TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_part_answers_as_the_whole(transform, share):
    theirs = np.random.default_rng(0).normal(size=transform.theirs)
    for cut in ("middle", "whole", "first", "nothing"):
        bounds = {
            "middle": [(size // 3, size - size // 4) for size in transform.ours],
            "whole": [(0, size) for size in transform.ours],
            "first": [(0, 1) for _ in transform.ours],
            "nothing": [(0, 0) for _ in transform.ours],
        }[cut]
        part = part_of(transform, bounds)
        box = theirs[part.box]
        inside = [slice(start - at, stop - at) for (start, stop), at in zip(bounds, part.origin, strict=True)]
        expected = transform.read(theirs, [slice(*one) for one in bounds])
        np.testing.assert_array_equal(part.transform.read(box, inside), expected)
        if cut == "middle":
            assert box.size <= share * theirs.size
