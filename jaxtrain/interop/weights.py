"""A published model opened: its family, its settings in our words, and where our parameters lie. No jax here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.published.bitsandbytes import with_quantized
from jaxtrain.published.config_file import is_published_folder
from jaxtrain.published.entries import Entry, Row, Skipped, Tied, names_of, positions
from jaxtrain.published.families.table import family_of, read_settings
from jaxtrain.published.family import Family
from jaxtrain.published.folder import Source, open_folder
from jaxtrain.published.transforms import Shape


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
        """Returns what stands at a position of its stack.

        Args:
            position: Index in each dim of the row's stack.
        """
        transform = self.place.row.transform
        return transform.read(self.published.source.read(self.name_at(position)), [slice(None)] * len(transform.ours))

    def name_at(self, position: tuple[int, ...]) -> str:
        """Returns the name of the tensor that holds what stands at a position of the stack."""
        stack = self.place.row.stack
        return self.place.names[int(np.ravel_multi_index(position, stack)) if stack else 0]


@dataclass(frozen=True)
class Places:
    """Where every parameter lies: path -> place, for the two trees of a model."""

    params: Mapping[str, Place]
    model_state: Mapping[str, Place]


def is_published(path: str | Path) -> bool:
    """Whether a path is that of a published model: a folder with a config.json of one, or a GGUF file."""
    return Path(path).suffix == ".gguf" or is_published_folder(path)


def open_source(path: str | Path) -> Source:
    """Opens a published folder, or a GGUF file; no tensor is read.

    Raises:
        ConfigError: No such folder or file, or no config.json in it.
        CheckpointError: Its files are missing or damaged.
    """
    if Path(path).suffix == ".gguf":
        from jaxtrain.published.gguf_source import open_gguf

        gguf: Any = open_gguf(path)
        return gguf
    return with_quantized(open_folder(path))


def open_published(path: str | Path) -> PublishedModel:
    """Opens a published model and reads its config; no tensor is read.

    Raises:
        ConfigError: No such folder or file, a family that is not known, or a key or a value that is not supported.
        CheckpointError: Its files are missing or damaged.
    """
    source = open_source(path)
    try:
        family = family_of(source.config.get("model_type"))
        settings = read_settings(source.config)
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
    found: dict[bool, dict[str, Place]] = {False: {}, True: {}}
    used: set[str] = set()
    missing: list[str] = []
    strange: list[str] = []
    integers: list[str] = []
    for row in rows:
        if isinstance(row, Entry):
            names = []
            for position in positions(row):
                candidates = names_of(row, position)
                name = next((one for one in candidates if one in tensors), None)
                if name is None:
                    if not row.path.startswith(fresh):
                        missing.append(candidates[0])
                    continue
                names.append(name)
                if tensors[name][1].kind in "iub":
                    integers.append(f"{name} is {tensors[name][1]}")
                if tensors[name][0] != row.transform.theirs:
                    strange.append(f"{name} is {list(tensors[name][0])}, not {list(row.transform.theirs)}")
            used.update(names)
            if len(names) == _count(row):
                place = Place(row, tuple(names), tensors[names[0]][1]) if names else None
                if place is not None:
                    found[row.state][row.path] = place
        elif not isinstance(row, Skipped):
            used.update(name for name in _all_names(row) if name in tensors)
    skipped = [re.compile(row.pattern) for row in rows if isinstance(row, Skipped)]
    extra = [name for name in tensors if name not in used and not any(one.fullmatch(name) for one in skipped)]
    _refuse(published, missing, extra if not fresh else [], strange, integers)
    places = Places(found[False], found[True])
    for row in rows:
        if isinstance(row, Tied):
            _check_tied(published, row, places)
    return places


def _count(row: Entry) -> int:
    return int(np.prod(row.stack, dtype=int))


def _all_names(row: Row) -> list[str]:
    if isinstance(row, Tied):
        return list(names_of(row))
    assert not isinstance(row, Skipped)
    return [name for position in positions(row) for name in names_of(row, position)]


def _refuse(
    published: PublishedModel, missing: list[str], extra: list[str], strange: list[str], integers: list[str]
) -> None:
    problems = {
        "lacks": missing,
        "has too many": extra,
        "has other shapes": strange,
        "has integers for parameters": integers,
    }
    said = [f"{what} ({len(names)}): {', '.join(names[:3])}" for what, names in problems.items() if names]
    if said:
        raise CheckpointError(
            f"the tensors of {published.path} do not fit its config.json as the family {published.family.name} reads "
            f"it: it {'; it '.join(said)}"
        )


def _check_tied(published: PublishedModel, row: Tied, places: Places) -> None:
    """Raises where a tensor that repeats another differs from it: leaving it out would change the model."""
    place = places.params.get(row.to)
    name = next((one for one in names_of(row) if one in published.source.tensors), None)
    if name is None or place is None or name in place.names:
        return
    own, other = published.source.read(name), published.source.read(place.names[0])
    if own.shape != other.shape or not np.array_equal(own, other):
        raise CheckpointError(
            f"{published.path}: {name} differs from {place.names[0]}, although its config.json ties them; set "
            f"{row.instead}"
        )
