"""Models of your own that a config names by a function."""

from typing import Any

from flax import linen, nnx

from jaxtrain.config.base import Call
from jaxtrain.errors import ConfigError
from jaxtrain.models.model import Model
from jaxtrain.runtime.call import call_function, described


def called_model(
    config: Call, *, input_shape: tuple[int, ...], vocab_size: int | None, num_outputs: int | None
) -> Model:
    """Call the function of `model.call`.

    Args:
        config: names the function and its arguments.
        input_shape, vocab_size, num_outputs: of the data; the function gets those that its signature names and the
            config leaves out.

    Returns:
        The model that the function returns.

    Raises:
        ConfigError: see `call_function`, or the function returned something else.
    """
    sizes = {"input_shape": input_shape, "vocab_size": vocab_size, "num_outputs": num_outputs}
    made = call_function("model", config.call, config.args, offered=sizes)
    if isinstance(made, Model):
        return made
    raise ConfigError(
        f"model.call={config.call} returned {described(made)}, not a jaxtrain.Model; {_how_to_make_a_model(made)}"
    )


def _how_to_make_a_model(made: Any) -> str:
    kind = made if isinstance(made, type) else type(made)
    if issubclass(kind, nnx.Module):
        return f"return jaxtrain.from_nnx(lambda rngs: {kind.__name__}(..., rngs=rngs))"
    if issubclass(kind, linen.Module):
        return f"return jaxtrain.from_linen({kind.__name__}(...), example_inputs)"
    return "return what jaxtrain.from_nnx, from_linen, from_functions or build_model gives"
