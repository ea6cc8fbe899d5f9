"""What tells the base of an adapter from another model of the same shapes: digests of its parameters. No jax here.

A digest is of the first numbers of every layer of a parameter, in float32. Training moves all numbers of a parameter,
so that these few tell two models apart, and reading them takes no time for a model of any size. They do not depend on
how files are sharded, named or laid out. They are no proof that a file is whole.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxtrain.errors import CheckpointError
from jaxtrain.interop.weights import Place, PublishedModel
from jaxtrain.published.config_file import read_json
from jaxtrain.published.parts import part_of
from jaxtrain.runtime.files import write_json_atomic

FILE = "base_digest.json"
"""File of an adapter's folder; PEFT does not read it."""
# Numbers per dimension of each layer of a parameter.
_SAMPLE = 8


def base_digests(published: PublishedModel, places: Mapping[str, Place]) -> dict[str, str]:
    """Returns path -> digest of the parameters of a published model.

    Args:
        published: The model.
        places: Path -> where the parameter lies in it.
    """
    return {path: _digest(published, place) for path, place in places.items()}


def _digest(published: PublishedModel, place: Place) -> str:
    transform = place.row.transform
    bounds = [(0, min(_SAMPLE, size)) for size in transform.ours]
    part = part_of(transform, bounds)
    slices = [slice(start - at, stop - at) for (start, stop), at in zip(bounds, part.origin, strict=True)]
    found = hashlib.sha256()
    for name in place.names:
        sample = part.transform.read(published.source.read(name, part.box), slices)
        found.update(np.ascontiguousarray(sample, "<f4").tobytes())
    return found.hexdigest()[:16]


def write_base_digests(folder: Path, digests: Mapping[str, str]) -> None:
    """Writes the file of digests into an adapter's folder.

    Args:
        folder: The folder.
        digests: From `base_digests`, of the base that the adapter was trained on.
    """
    write_json_atomic(folder / FILE, {"digests": dict(digests)})


def check_base(folder: Path, published: PublishedModel, places: Mapping[str, Place]) -> None:
    """Raises where a published model is not the one that an adapter's folder has the digests of.

    Args:
        folder: The folder; one without digests is not checked.
        published: The model that is to be the base.
        places: Path -> where each of its parameters lies.

    Raises:
        CheckpointError: Names a parameter that differs.
    """
    file = folder / FILE
    if not file.is_file():
        return
    digests = read_json(file, CheckpointError).get("digests")
    if not isinstance(digests, Mapping):
        raise CheckpointError(f"{file} holds no digests; write the adapter again, or remove the file")
    # A head that one of the two does not have is not compared.
    common = {path: place for path, place in places.items() if path in digests}
    other = next((path for path, found in base_digests(published, common).items() if found != digests[path]), None)
    if other is not None:
        raise CheckpointError(
            f"{folder} is an adapter of another base than {published.path}: {other} differs from what {FILE} says; "
            f"name the base that it was trained on, or remove {FILE} to use it over this one"
        )
