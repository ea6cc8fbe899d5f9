"""Which pairs of a query and a key attention computes, apart from its arrays. No jax here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionForm:
    """A kind of attention, apart from its arrays; every implementation takes all of it or refuses.

    Attributes:
        causal: a query sees keys at or before its own position only.
        window: a query sees keys less than this many positions away (its own counts as one); None: any distance.
        softcap: scores become softcap * tanh(scores / softcap) before the mask (Gemma 2); None: as they are.
        relative: a bias by the distance of key and query is added to the scores (T5; see `relative.py`).
    """

    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    relative: bool = False


CAUSAL = AttentionForm()
