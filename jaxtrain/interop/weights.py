"""A published model opened: its family, its settings in our words, and where our parameters lie. No jax here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.interop.families.family import Family
from jaxtrain.interop.families.table import family_of, read_settings
from jaxtrain.interop.formats.nf4 import with_quantized
from jaxtrain.interop.formats.rows import Entry, Shape, Skipped, Tied, names_of, positions
from jaxtrain.interop.formats.safetensors import Source, open_folder


@dataclass(frozen=True)
class Place:
    """Where one of our parameters lies in a published model.

    Attributes:
        row: The row of the family's table.
        names: Name of their tensor for each position of the row's stack, in order.
        dtype: The dtype of the first of them.
    """

    row: Entry
    names: tuple[str, ...]
    dtype: np.dtype

    @property
    def shape(self) -> Shape:
        """Shape of our parameter."""
        return self.row.shape


@dataclass(frozen=True)
class PublishedModel:
    """A published model, opened by `open_published`.

    Attributes:
        path: The folder or file.
        source: What its tensors are read from.
        family: Its family.
        settings: Keys of our model group, as its config.json says.
    """

    path: Path
    source: Source
    family: Family
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class StoredParameter:
    """One of our parameters in a published model, read a layer at a time: what is written in the place of an array."""

    published: PublishedModel
    place: Place

    @property
    def shape(self) -> Shape:
        """Shape of the parameter."""
        return self.place.shape

    def read(self, position: tuple[int, ...]) -> np.ndarray:
        """Returns what stands at a position of its stack."""
        return self.place.row.transform.read_all(self.published.source.read(self.name_at(position)))

    def name_at(self, position: tuple[int, ...]) -> str:
        """Returns the name of the tensor that holds what stands at a position of the stack."""
        stack = self.place.row.stack
        return self.place.names[int(np.ravel_multi_index(position, stack)) if stack else 0]


@dataclass(frozen=True)
class Places:
    """Where every parameter lies: path -> place, for the two trees of a model."""

    params: Mapping[str, Place]
    model_state: Mapping[str, Place]


def open_published(path: str | Path) -> PublishedModel:
    """Opens a published folder, or a GGUF file, and reads its config; no tensor is read.

    Raises:
        ConfigError: No such folder or file, a family that is not known, or a key or a value that is not supported.
        CheckpointError: Its files are missing or damaged.
    """
    if Path(path).suffix == ".gguf":
        from jaxtrain.interop.formats.gguf_model import open_gguf

        source: Any = open_gguf(path)
    else:
        source = with_quantized(open_folder(path))
    try:
        family, settings = family_of(source.config.get("model_type")), read_settings(source.config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return PublishedModel(Path(path), source, family, settings)


def find_places(published: PublishedModel, settings: Mapping[str, Any], *, fresh: tuple[str, ...] = ()) -> Places:
    """Returns where each parameter of a model with these settings lies.

    Args:
        published: The published model.
        settings: Every key of our model group, with its sizes filled in (see `settings_of`).
        fresh: Beginnings of paths that may be missing as a whole: what a head of another kind draws anew. Tensors of
            the file that nothing reads are then no mistake.

    Raises:
        CheckpointError: Tensors that are missing, too many or of another shape; names the first three.
    """
    tensors = published.source.tensors
    rows = published.family.tensors(settings)
    places = Places({}, {})
    used: set[str] = set()
    problems: dict[str, list[str]] = {"lacks": [], "has too many": [], "has other shapes or dtypes": []}
    for row in rows:
        if isinstance(row, Skipped):
            continue
        names = []
        for position in positions(row):
            candidates = names_of(row, position)
            name = next((one for one in candidates if one in tensors), None)
            if name is not None:
                names.append(name)
            elif isinstance(row, Entry) and not row.path.startswith(fresh):
                problems["lacks"].append(candidates[0])
            used.update(one for one in candidates if one in tensors)
        if not isinstance(row, Entry) or not names:
            continue
        for name in names:
            shape, dtype = tensors[name]
            if shape != row.transform.theirs or dtype.kind in "iub":
                wanted = list(row.transform.theirs)
                problems["has other shapes or dtypes"].append(f"{name} is {dtype}{list(shape)}, not floats {wanted}")
        place = Place(row, tuple(names), tensors[names[0]][1])
        (places.model_state if row.state else places.params)[row.path] = place  # pyright: ignore[reportIndexIssue]
    if not fresh:
        skipped = [re.compile(row.pattern) for row in rows if isinstance(row, Skipped)]
        rest = (name for name in tensors if name not in used)
        problems["has too many"] += (name for name in rest if not any(one.fullmatch(name) for one in skipped))
    said = [f"{what} ({len(names)}): {', '.join(names[:3])}" for what, names in problems.items() if names]
    if said:
        raise CheckpointError(
            f"the tensors of {published.path} do not fit its config.json as the family {published.family.name} reads "
            f"it: it {'; it '.join(said)}"
        )
    for row in rows:
        if isinstance(row, Tied):
            _check_tied(published, row, places)
    return places


def _check_tied(published: PublishedModel, row: Tied, places: Places) -> None:
    """Raises where a tensor that repeats another differs from it: leaving it out would change the model."""
    place = places.params.get(row.to)
    name = next((one for one in names_of(row) if one in published.source.tensors), None)
    if name is None or place is None or name in place.names:
        return
    if not np.array_equal(published.source.read(name), published.source.read(place.names[0])):
        raise CheckpointError(
            f"{published.path}: {name} differs from {place.names[0]}, although its config.json ties them; set "
            "model.tie_embeddings=false"
        )
