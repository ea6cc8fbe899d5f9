"""The rows of the cache as the host sees them: whose each is, and which tokens it holds."""

from collections.abc import Iterable, Sequence

from jaxtrain.inference.engine.drafts import Drafts
from jaxtrain.inference.engine.ticket import Ticket
from jaxtrain.models.decoder import Ring, can_go_on

# A shorter common beginning, such as the token that begins every text, is no reason to overwrite a longer text.
_WORTH_KEEPING = 16


class Slot:
    """A row of the cache.

    Args:
        index: of the row.
        ring: of layers with a window; None: the row keeps all positions.

    Attributes:
        index: of the row.
        ring: as given.
        written: one more than the last position that was written since position 0 was.
        ticket: whose it is; None: it is free.
        cached: tokens whose keys and values are at positions 0, 1, ... of the row. They stay when the row becomes free,
            so that a prompt that begins with them need not be read again.
        text: prompt and answer so far.
        emitted: tokens of the answer.
        reuses: whether what the row, or another, has of the prompt is kept.
        drafts: an index of the text, for a request whose tokens may be drafted; None: they may not.
        order: number of the request that has the row, or had it last.
        has_bias: whether the biases of the row on the device may be other than zero.
    """

    def __init__(self, index: int, ring: Ring | None = None):
        self.index, self.ring = index, ring
        self.written = 0
        self.ticket: Ticket | None = None
        self.cached: list[int] = []
        self.text: list[int] = []
        self.emitted = 0
        self.reuses = False
        self.drafts: Drafts | None = None
        self.order = 0
        self.has_bias = False

    @property
    def reads(self) -> bool:
        """Whether a part of its prompt is still to be read."""
        return self.ticket is not None and len(self.cached) < len(self.ticket.request.tokens)

    @property
    def writes(self) -> bool:
        """Whether its next token can be computed from the last one alone."""
        return self.ticket is not None and not self.reads

    def take(self, ticket: Ticket, order: int, *, reuse: bool, speculate: bool) -> None:
        """Give the row to a request, and keep what its prompt begins with.

        Args:
            ticket: of the request.
            order: its number.
            reuse: whether what the row has of the prompt is kept.
            speculate: whether tokens may be drafted.
        """
        tokens = ticket.request.tokens
        kept = min(kept_prefix(self, tokens), len(tokens) - 1) if reuse else 0
        self.written = self.written if kept else 0
        self.ticket, self.order, self.emitted, self.reuses = ticket, order, 0, reuse
        self.cached, self.text = self.cached[:kept], list(tokens)
        self.drafts = Drafts(tokens) if speculate else None
        ticket.cached_tokens = kept

    def wrote(self, end: int) -> None:
        """Note that positions before `end` were written, be it by tokens of the text or by drafts that were refused."""
        self.written = max(self.written, end)

    def borrow(self, lender: "Slot", kept: int) -> None:
        """Note that another row's keys and values were copied to this one, for the first tokens of the prompt.

        Args:
            lender: the other row.
            kept: how many tokens.
        """
        assert self.ticket is not None
        self.written = lender.written
        self.cached = self.text[:kept]
        self.ticket.cached_tokens = kept

    def release(self) -> None:
        """Free the row; its keys and values stay."""
        self.ticket, self.drafts, self.text = None, None, []


def shared_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens that two texts begin with alike."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))


def kept_prefix(slot: Slot, tokens: Sequence[int]) -> int:
    """Count the tokens of a prompt after which its text can go on in a row.

    Args:
        slot: the row.
        tokens: of the prompt.

    Returns:
        Those that the prompt and the row have in common; 0 where layers with a window have overwritten what the next
        token sees. (The last token of a prompt is read in any case: its logits choose the first one of the answer.)
    """
    shared = shared_prefix(slot.cached, tokens)
    return shared if can_go_on(slot.ring, min(shared, len(tokens) - 1), slot.written) else 0


def lender_for(slot: Slot, slots: Iterable[Slot]) -> tuple[Slot | None, int]:
    """Find the row that has more of a prompt than the request's own row, by enough to be worth a copy.

    Args:
        slot: of the request, before its prompt is read.
        slots: all rows, free or not.

    Returns:
        The row, or None, and how many tokens it has.
    """
    assert slot.ticket is not None
    tokens = slot.ticket.request.tokens
    best, most = None, len(slot.cached) + _WORTH_KEEPING - 1
    for other in slots:
        kept = min(kept_prefix(other, tokens), len(tokens) - 1)
        if other is not slot and kept > most:
            best, most = other, kept
    return best, most


def slot_for(slots: Iterable[Slot], tokens: Sequence[int]) -> Slot | None:
    """Choose the free row that has most of a prompt; of equal ones that which has been free for longest.

    Args:
        slots: all rows.
        tokens: of the prompt.

    Returns:
        The row; None where all are in use.
    """
    free = [slot for slot in slots if slot.ticket is None]
    return max(free, key=lambda slot: (kept_prefix(slot, tokens) // _WORTH_KEEPING, -slot.order), default=None)
