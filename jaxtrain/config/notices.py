"""How a run hears that it must stop: signals, and the metadata server of its machine. No jax here."""

from typing import Annotated, Literal

from pydantic import Field

from jaxtrain.config.base import Group


class NoticesConfig(Group):
    """How a run hears that it must stop, and how it leaves."""

    metadata: Literal["auto"] | bool = "auto"
    """Watch the metadata server of a Google Cloud VM; auto: on such a VM, or where GCE_METADATA_HOST is set."""
    patience_seconds: Annotated[float, Field(gt=0, le=3600)] = 5.0
    """Seconds after a signal at which a compilation, a batch of an evaluation or a callback is left, to save."""
