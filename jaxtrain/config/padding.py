"""Which rows say of each token whether it is padding, for the models that must know. No jax here."""

from jaxtrain.config.chat import ChatData, gives_pairs
from jaxtrain.config.data import DocumentsData
from jaxtrain.config.models import TransformerConfig
from jaxtrain.config.rope import LongRope
from jaxtrain.config.schema import Config


def marks_padding(config: Config) -> bool:
    """Returns whether rows of one text each get `segments` because of the model.

    Attention that sees what is before it alone does without them, and has more kernels so. But experts count their
    tokens, and longrope asks how long a text is.

    Args:
        config: With a model of its own.
    """
    model, data = config.model, config.data
    if not isinstance(model, TransformerConfig):
        return False
    pairs = isinstance(data, ChatData) and gives_pairs(data, config.task)
    if isinstance(data, ChatData):
        padded = pairs or not data.packing
    else:
        padded = isinstance(data, DocumentsData) and data.rows == "document"
    # A reward model is given them by its task, and preferences add no loss of the router.
    if not padded or config.task == "reward":
        return False
    length, scaling = getattr(data, "sequence_length", None) or model.max_sequence_length, model.rope_scaling
    is_long = model.position == "rotary" and isinstance(scaling, LongRope) and length > scaling.original_length
    return is_long or (model.experts is not None and not pairs)
