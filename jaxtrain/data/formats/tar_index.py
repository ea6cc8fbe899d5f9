"""Where the members of a tar file lie: read once, and kept in the user's cache folder."""

import hashlib
import io
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxtrain.data.files import FileState, is_hidden
from jaxtrain.errors import DataError
from jaxtrain.runtime.files import write_bytes_atomic

# Of the arrays below; another one is read from the tar file again.
_VERSION = 4
# How a tar file ends.
_END_BYTES = 1024


@dataclass(frozen=True)
class TarIndex:
    """The members of a tar file, in groups that share the part of their name before its first dot.

    Attributes:
        starts: int64 [num_groups + 1], the first member of each group.
        offsets: int64 [num_members], where the content of each member begins.
        sizes: int64 [num_members], its bytes.
        kinds: int32 [num_members], the number of its ending in `endings`.
        endings: What follows the first dot of a name: "jpg", "cls".
        keys: The name of each group, in UTF-8.
    """

    starts: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    kinds: np.ndarray
    endings: tuple[str, ...]
    keys: np.ndarray

    def members(self, group: int) -> dict[str, tuple[int, int]]:
        """Returns ending -> (offset, size) of the members of a group."""
        inside = range(int(self.starts[group]), int(self.starts[group + 1]))
        return {self.endings[self.kinds[i]]: (int(self.offsets[i]), int(self.sizes[i])) for i in inside}

    def key(self, group: int) -> str:
        """Returns the name of a group."""
        return self.keys[group].decode("utf-8", errors="replace")


def tar_index(state: FileState, *, folder: Path | None) -> TarIndex:
    """Returns where the members of a tar file lie.

    Args:
        state: The file.
        folder: Where the index is kept; None, or a folder that cannot be written: it is made each time.

    Raises:
        DataError: It is no uncompressed tar file, is cut off, or the members of a group are apart.
    """
    kept = None
    if folder is not None:
        name = f"{state.path.absolute()}\0{state.num_bytes}\0{state.modified_ns}\0{_VERSION}"
        kept = folder / f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}.npz"
        found = _kept_index(kept)
        if found is not None:
            return found
    index = _read(state)
    if kept is not None:
        _keep(index, kept)
    return index


def _kept_index(path: Path) -> TarIndex | None:
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
        return TarIndex(**{**arrays, "endings": tuple(arrays["endings"].tolist())})
    except Exception:  # missing, half written by an older version, or damaged: it is made again
        return None


def _keep(index: TarIndex, path: Path) -> None:
    content = io.BytesIO()
    arrays = {**vars(index), "endings": np.array(index.endings)}
    np.savez(content, **arrays)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(path, content.getvalue())
    except OSError:  # a cache folder that is full or read-only costs time, and nothing else
        return


def _read(state: FileState) -> TarIndex:
    path = state.path
    starts, offsets, sizes, kinds = [], [], [], []
    endings: dict[str, int] = {}
    keys: dict[str, None] = {}
    there: set[str] = set()
    last = None
    try:
        with path.open("rb") as file:
            file.seek(max(0, state.num_bytes - _END_BYTES))
            if file.read().strip(b"\0"):
                _refuse_packed(path)
                raise DataError(f"{path} does not end as a tar file does, it was cut off; fetch or write it again")
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                stem, _, ending = name.partition(".")
                ending = ending.lower()  # as WebDataset does: ImageNet's files end in .JPEG
                if is_hidden(member.name.split("/")):
                    continue
                if stem and (member.islnk() or member.issym() or member.issparse()):
                    kind = "file with holes" if member.issparse() else "link"
                    raise DataError(
                        f"{path} has '{member.name}' as a {kind}, whose content does not lie there; write it again "
                        "without --sparse: tar --dereference --hard-dereference -cf"
                    )
                if not member.isfile() or not stem:
                    continue
                key = f"{folder}/{stem}" if folder else stem
                if key != last:
                    if key in keys:
                        raise DataError(
                            f"{path} has the members of '{key}' apart from each other; write it again in the order of "
                            "the names: tar --sort=name -cf"
                        )
                    keys[key], last = None, key
                    starts.append(len(offsets))
                    there = set()
                if ending in there:
                    raise DataError(f"{path} has the member '{member.name}' twice; write it again")
                if member.offset_data + member.size > state.num_bytes:
                    raise DataError(f"{path} is cut off inside of '{member.name}'; fetch or write it again")
                there.add(ending)
                offsets.append(member.offset_data)
                sizes.append(member.size)
                kinds.append(endings.setdefault(ending, len(endings)))
                # The archive keeps every member it has seen, which nobody asks for.
                archive.members = []  # pyright: ignore[reportAttributeAccessIssue] it has them
            _check_end(path, archive.offset)
    except tarfile.TarError as error:
        _refuse_packed(path)
        raise DataError(f"{path} is no tar file, or damaged ({error}); fetch or write it again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); check its permissions") from None
    if not keys:
        raise DataError(f"{path} holds no file; give a tar file with members such as 000.jpg and 000.cls")
    encoded = [key.encode("utf-8", errors="surrogateescape") for key in keys]
    return TarIndex(
        starts=np.array([*starts, len(offsets)], np.int64),
        offsets=np.array(offsets, np.int64),
        sizes=np.array(sizes, np.int64),
        kinds=np.array(kinds, np.int32),
        endings=tuple(endings),
        keys=np.array(encoded),
    )


def _check_end(path: Path, end: int) -> None:
    """Raises a DataError where something follows the last member: tarfile takes a damaged header for the end."""
    with path.open("rb") as file:
        file.seek(end)
        while part := file.read(2**20):
            if part.strip(b"\0"):
                raise DataError(
                    f"{path} is damaged at byte {end}, or is several tar files one after another (join them with: tar "
                    "--concatenate); fetch or write it again"
                )


def _refuse_packed(path: Path) -> None:
    with path.open("rb") as file:
        first = file.read(4)
    if first.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh")):
        raise DataError(
            f"{path} is compressed, so that no member can be found without reading all before it; decompress it "
            f"(gunzip, zstd -d): its images are compressed anyway"
        ) from None
