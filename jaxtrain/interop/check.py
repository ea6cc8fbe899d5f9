"""A published folder here and in transformers, side by side: logits, and the first layer that differs."""

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import ConfigError
from jaxtrain.interop.pretrained import Pretrained, load_pretrained

# Share of the range of the values above which a layer is said to differ; float32 rounding is a hundredth of it.
_DIFFERS = 1e-3
_TOKENS = 16
# End of an architecture's name -> the class of transformers that opens it.
_OPENERS: dict[str, Callable[[Any], Any]] = {
    "ForCausalLM": lambda transformers: transformers.AutoModelForCausalLM,
    "LMHeadModel": lambda transformers: transformers.AutoModelForCausalLM,
    "ForMaskedLM": lambda transformers: transformers.AutoModelForMaskedLM,
    "ForSequenceClassification": lambda transformers: transformers.AutoModelForSequenceClassification,
    "ForTokenClassification": lambda transformers: transformers.AutoModelForTokenClassification,
}


def import_transformers() -> tuple[Any, Any]:
    """Returns the modules torch and transformers.

    Raises:
        ConfigError: They are not installed.
    """
    try:
        torch, transformers = import_module("torch"), import_module("transformers")
    except ImportError as error:
        missing = error.name or "transformers"
        raise ConfigError(
            f"--check compares with transformers, and {missing} is not installed; run pip install torch transformers, "
            "or leave --check out"
        ) from None
    return torch, transformers


def compare_with_transformers(path: str | Path) -> Iterator[str]:
    """Yields lines that compare the logits of a published model, here and in transformers, on a few tokens.

    Args:
        path: The published folder.

    Raises:
        ConfigError: transformers is not installed, or the model is of a kind that is not compared.
    """
    torch, transformers = import_transformers()
    pretrained = load_pretrained(path, model={"attention": "reference"})
    name = str((pretrained.published.source.config.get("architectures") or [""])[0])
    opener = next((opener for end, opener in _OPENERS.items() if name.endswith(end)), None)
    if opener is None or pretrained.config.model_dump().get("vocab_size") is None or Path(path).suffix == ".gguf":
        raise ConfigError(f"--check compares folders of models of tokens, and {path} is none ({name})")
    vocabulary = pretrained.config.model_dump()["vocab_size"]
    tokens = np.random.default_rng(0).integers(5, vocabulary, (1, _TOKENS))
    theirs = opener(transformers).from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        outputs = theirs(input_ids=torch.tensor(tokens), output_hidden_states=True)
    ours = pretrained.model.apply(pretrained.params, pretrained.model_state, jnp.asarray(tokens), key=None, train=False)
    logits, expected = np.asarray(ours[0], np.float32), outputs.logits.float().numpy()
    difference, width = np.abs(logits - expected).max(), np.ptp(expected)
    yield f"largest difference of logits: {difference:.2e} of a range of {width:.3g} ({difference / width:.1e})"
    # The last of theirs is behind the last norm.
    hidden = [state.float().numpy() for state in outputs.hidden_states[:-1]]
    for number, (own, state) in enumerate(zip(_hidden_states(pretrained, jnp.asarray(tokens)), hidden, strict=False)):
        if np.abs(own - state).max() > _DIFFERS * np.ptp(state):
            yield f"the first that differs: {'the embedding' if number == 0 else f'layer {number - 1}'}"
            return
    yield "no layer differs" if difference <= _DIFFERS * width else f"the first that differs: layer {len(hidden) - 1}"


def _hidden_states(pretrained: Pretrained, tokens: jax.Array) -> Iterator[np.ndarray]:
    """The residual stream before the first layer and after each."""
    parts, params = pretrained.model.parts, pretrained.params
    if parts is None:
        return
    rest = {name: value for name, value in params.items() if name != parts.stack}
    carry = parts.embed(rest, tokens, key=None, train=False)
    yield np.asarray(jax.tree.leaves(carry)[0], np.float32)
    for layer in range(parts.num_layers):
        one = jax.tree.map(lambda leaf, layer=layer: leaf[layer : layer + 1], params[parts.stack])
        carry = parts.layers(one, carry, tokens, first_layer=layer, key=None, train=False)
        yield np.asarray(jax.tree.leaves(carry)[0], np.float32)
