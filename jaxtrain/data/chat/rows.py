"""Rows of chats: conversations cut, dropped, packed several to a row or padded, and pairs of answers.

Shapes: B rows of a batch, N conversations, L tokens per row.
"""

import bisect
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxtrain.data.chat.masks import MaskedTokens
from jaxtrain.data.rows import Row, Rows
from jaxtrain.data.skipped import BadRecordError, SkippedRecords
from jaxtrain.errors import DataError

# Constant, so that the rows of a run are those of every other.
_ORDER_SEED = 20240602


@dataclass(frozen=True)
class Store:
    """Conversations as tokens, one after another.

    Attributes:
        ids: int32 [all tokens].
        trained: bool [all tokens].
        starts: int64 [N + 1], where each conversation begins.
        length: L.
        padding: Id that fills rows up.
    """

    ids: np.ndarray
    trained: np.ndarray
    starts: np.ndarray
    length: int
    padding: int

    @property
    def sizes(self) -> np.ndarray:
        """Places that each conversation takes in a row, int64 [N]: its last token is a target alone."""
        return np.diff(self.starts) - 1


@dataclass(frozen=True)
class Fitted:
    """Conversations that fit into rows.

    Attributes:
        kept: int64 [num_kept], which of the conversations are left.
        tokens: Those conversations, cut where they were too long.
        cut: How many were.
        dropped: How many are not left because they are too long.
    """

    kept: np.ndarray
    tokens: list[MaskedTokens]
    cut: int
    dropped: int


def fit(
    conversations: Iterable[MaskedTokens],
    *,
    length: int,
    too_long: str,
    together: int = 1,
    scored: bool = False,
    skipped: SkippedRecords | None = None,
    of: int = 0,
) -> Fitted:
    """Cuts or drops what is too long.

    Args:
        conversations: As tokens.
        length: L.
        too_long: As `ChatData.too_long`.
        together: Neighbours that are left or dropped as one: 2 for pairs.
        scored: Whether the last token must be an input too, so that a row has room for L tokens and not for L + 1.
        skipped: Counts pairs whose answers the template makes equal, which are left out; None: an error.
        of: Number of conversations.

    Raises:
        DataError: A conversation is too long and may be neither cut nor dropped, or both of a pair are equal.
    """
    kept: list[int] = []
    tokens: list[MaskedTokens] = []
    most = length if scored else length + 1
    cut = dropped = 0
    group: list[tuple[MaskedTokens, bool]] = []
    for number, one in enumerate(conversations):
        # What follows the last token with a loss changes nothing: it needs no place in a row.
        count = int(np.flatnonzero(one.trained)[-1]) + 1 if one.trained.any() else len(one.ids)
        over = count > most
        if over and too_long == "error":
            raise DataError(
                f"{one.where} has {count:,} tokens, but rows have {length:,}; raise data.sequence_length, or set "
                "data.too_long=cut or data.too_long=drop"
            )
        end = min(most, count)
        group.append((MaskedTokens(one.where, one.ids[:end], one.trained[:end]), over))
        if len(group) == together:
            same = together == 2 and np.array_equal(group[0][0].ids, group[1][0].ids)
            is_bad = any(not len(part.ids) for part, _ in group)
            if same and not is_bad and not _any_over(group):
                error = BadRecordError(
                    f"{one.where} has equal answers where the chat template has written them (it may drop spaces); "
                    "a pair needs two that differ"
                )
                if skipped is None:
                    raise error
                skipped.add(error, of=of)
                is_bad = True
            # The first token is nobody's target; a conversation may lose all of its answers to the cut, and a pair what
            # tells its answers apart.
            is_left = all(part.trained[1:].any() for part, _ in group) and not same
            is_left = is_left and not (too_long == "drop" and _any_over(group))
            if is_left:
                kept += range(number + 1 - together, number + 1)
                tokens += [part for part, _ in group]
                cut += _any_over(group)
            else:
                dropped += not is_bad
            group = []
    return Fitted(np.array(kept, np.int64), tokens, cut, dropped)


def _any_over(group: Sequence[tuple[MaskedTokens, bool]]) -> bool:
    return any(over for _, over in group)


def make_store(tokens: Sequence[MaskedTokens], *, length: int, padding: int) -> Store:
    """Puts conversations one after another."""
    starts = np.concatenate([[0], np.cumsum([len(one.ids) for one in tokens], dtype=np.int64)])
    ids = np.concatenate([np.zeros(0, np.int32), *(one.ids for one in tokens)])
    trained = np.concatenate([np.zeros(0, bool), *(one.trained for one in tokens)])
    return Store(ids, trained, starts, length, padding)


def packed(sizes: np.ndarray, length: int) -> list[list[int]]:
    """Distributes conversations over few rows: the largest first, each into the fullest row that has room for it.

    Args:
        sizes: Places that each takes, int [N], at most `length`.
        length: Places of a row.

    Returns:
        The conversations of each row; rows are in an order that looks random and is always the same.
    """
    rows: list[list[int]] = []
    rooms: list[int] = []  # ascending, the rooms that some row has
    with_room: dict[int, list[int]] = {}
    for number in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[number])
        place = bisect.bisect_left(rooms, size)
        if place == len(rooms):
            room, row = length, len(rows)
            rows.append([])
        else:
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[place], with_room[room]
        rows[row].append(number)
        left = room - size
        if left not in with_room:
            bisect.insort(rooms, left)
            with_room[left] = []
        with_room[left].append(row)
    # Neighbours are of one length, which batches without shuffling would show.
    return [rows[i] for i in np.random.default_rng(_ORDER_SEED).permutation(len(rows))]


class PackedRows(Rows):
    """Rows of several conversations: `tokens`, `segments` (1, 2, ..., and 0 after the last) and `positions` in each.

    Args:
        store: The conversations.
        rows: Which of them each row holds.
    """

    def __init__(self, store: Store, rows: Sequence[Sequence[int]]):
        super().__init__(len(rows))
        self._store = store
        self._members = np.array([number for row in rows for number in row], np.int64)
        self._firsts = np.concatenate([[0], np.cumsum([len(row) for row in rows], dtype=np.int64)])

    def num_tokens(self, numbers: np.ndarray) -> int:
        before = np.concatenate([[0], np.cumsum(self._store.sizes[self._members])])
        return int(np.diff(before[self._firsts])[numbers].sum())

    def gather(self, indices: np.ndarray) -> Row:
        store, shape = self._store, (len(indices), self._store.length)
        tokens_BL, targets_BL = np.full(shape, store.padding, np.int32), np.full(shape, store.padding, np.int32)
        segments_BL, positions_BL = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        weights_BL = np.zeros(shape, np.float32)
        for place, row in enumerate((indices % len(self)).tolist()):
            at = 0
            for segment, number in enumerate(self._members[self._firsts[row] : self._firsts[row + 1]].tolist()):
                begin, end = int(store.starts[number]), int(store.starts[number + 1]) - 1
                here = slice(at, at + end - begin)
                tokens_BL[place, here], targets_BL[place, here] = store.ids[begin:end], store.ids[begin + 1 : end + 1]
                weights_BL[place, here] = store.trained[begin + 1 : end + 1]
                segments_BL[place, here], positions_BL[place, here] = segment + 1, np.arange(end - begin)
                at = here.stop
        inputs = {"tokens": tokens_BL, "segments": segments_BL, "positions": positions_BL}
        return {"inputs": inputs, "targets": targets_BL, "weights": weights_BL}


class PaddedRows(Rows):
    """Rows of one conversation each, filled up at their end, where a weight of 0 leaves them out.

    Args:
        store: The conversations.
        numbers: Which of them, int64.
    """

    def __init__(self, store: Store, numbers: np.ndarray):
        super().__init__(len(numbers))
        self._store, self._numbers = store, numbers

    def num_tokens(self, numbers: np.ndarray) -> int:
        return int(self._store.sizes[self._numbers[numbers]].sum())

    def gather(self, indices: np.ndarray) -> Row:
        return _filled(self._store, self._numbers[indices % len(self)])


class PairRows(Rows):
    """Rows of two conversations, that with the chosen answer first: `inputs`, `targets` and `weights` are [2, L].

    Args:
        store: The conversations of pair k at 2 k and 2 k + 1.
        numbers: Which of the pairs, int64.
    """

    def __init__(self, store: Store, numbers: np.ndarray):
        super().__init__(len(numbers))
        self._store, self._numbers = store, numbers

    def num_tokens(self, numbers: np.ndarray) -> int:
        sizes = self._store.sizes[np.concatenate([2 * self._numbers[numbers], 2 * self._numbers[numbers] + 1])]
        return int(np.minimum(sizes + 1, self._store.length).sum())

    def gather(self, indices: np.ndarray) -> Row:
        store = self._store
        both = (2 * self._numbers[indices % len(self)][:, None] + np.arange(2)).reshape(-1)
        found = _filled(store, both)
        # The last token is an input too where there is room (`fit` makes it for `scored` ones): a reward model scores
        # the token that ends an answer.
        has_room = np.flatnonzero(store.sizes[both] < store.length)
        found["inputs"][has_room, store.sizes[both[has_room]]] = store.ids[store.starts[both[has_room] + 1] - 1]
        return {name: column.reshape(len(indices), 2, -1) for name, column in found.items()}


def _filled(store: Store, numbers: np.ndarray) -> Row:
    places_L = np.arange(store.length)
    inside_BL = places_L < store.sizes[numbers][:, None]
    at_BL = np.where(inside_BL, store.starts[numbers][:, None] + places_L, 0)
    padding = np.int32(store.padding)
    return {
        "inputs": np.where(inside_BL, store.ids[at_BL], padding),
        "targets": np.where(inside_BL, store.ids[at_BL + 1], padding),
        "weights": (inside_BL & store.trained[at_BL + 1]).astype(np.float32),
    }


def digest(store: Store, layout: Sequence[Sequence[int]]) -> str:
    """Returns a hash of all tokens, of what is trained, and of the rows that hold them."""
    found = hashlib.sha256()
    for array in (store.ids, store.trained, store.starts):
        found.update(np.ascontiguousarray(array).tobytes())
    for row in layout:
        found.update(np.array([len(row), *row], np.int64).tobytes())
    return found.hexdigest()
