"""What a server serves. No jax here."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxtrain.inference.special import SpecialTokens

if TYPE_CHECKING:
    from jaxtrain.data.chat.templates import ChatFormat
    from jaxtrain.data.tokenizer import BpeTokenizer, ByteTokenizer
    from jaxtrain.models.model import ModelState, Params
    from jaxtrain.models.sharded import ShardedModel


@dataclass(frozen=True)
class Served:
    """A model that is asked: its parameters on their mesh, and how texts become its inputs.

    Attributes:
        name: what clients call it.
        sharded_model: the model on its mesh.
        params: in its shardings; also quantized.
        model_state: what changes without a gradient.
        tokenizer: between texts and ids.
        chat: how conversations are written; None: the model has no chat template.
        embeds: whether it gives an embedding per text, and no text.
        created: when it was opened, seconds since 1970.
        max_length: positions that the model has; None: it does not say.
        special: what is known of its special tokens.
        step: of the checkpoint of a run; None: it is no run.
    """

    name: str
    sharded_model: "ShardedModel"
    params: "Params" = field(repr=False)
    model_state: "ModelState" = field(repr=False)
    tokenizer: "BpeTokenizer | ByteTokenizer"
    chat: "ChatFormat | None"
    embeds: bool
    created: int
    max_length: int | None = None
    special: SpecialTokens = field(default_factory=SpecialTokens)
    step: int | None = None
