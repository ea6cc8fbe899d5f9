"""A published model here and in transformers, side by side: outputs, and the first layer that differs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config.model import EncoderDecoderConfig
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.interop.pretrained import Pretrained, load_pretrained
from jaxtrain.models.from_nnx import from_dict
from jaxtrain.models.shipped.encoder_decoder import EncoderDecoder
from jaxtrain.remat.policy import Remat

# Share of the range of the values above which a layer is said to differ; float32 rounding is a hundredth of it.
_DIFFERS = 1e-3
_TOKENS = 16
# Ids below are those of special tokens in most vocabularies.
_FIRST_TOKEN = 5


@dataclass(frozen=True)
class _Stage:
    """What both compute on the way, float32: ours and theirs after a layer, and how the layer is called."""

    name: str
    ours: np.ndarray
    theirs: np.ndarray

    @property
    def difference(self) -> float:
        """The largest difference, as a share of the range of theirs."""
        return float(np.abs(self.ours - self.theirs).max() / max(np.ptp(self.theirs), np.finfo(np.float32).tiny))


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


def compare_with_transformers(path: str | Path) -> str:
    """Compares the outputs of a published model, here and in transformers, on a few tokens or on one image.

    Args:
        path: The published folder, or a GGUF file.

    Returns:
        One line that says how equal they are.

    Raises:
        ConfigError: transformers is not installed, or cannot open the model.
        CheckpointError: The outputs differ; names the first layer that does.
    """
    torch, transformers = import_transformers()
    pretrained = load_pretrained(path)
    if "attention" in type(pretrained.config).model_fields:
        # The plain kernel: the others round in another order.
        pretrained = load_pretrained(path, model={"attention": "reference"})
    theirs = _opened(torch, transformers, pretrained)
    ours, given = _inputs(pretrained)
    with torch.no_grad():
        answer = theirs(**{name: torch.from_numpy(value) for name, value in given.items()}, output_hidden_states=True)
    # On GPUs and TPUs a product of float32 has fewer bits otherwise.
    with jax.default_matmul_precision("highest"):
        outputs, _ = pretrained.model.apply(pretrained.params, pretrained.model_state, ours, key=None, train=False)
        outputs = outputs["logits"] if isinstance(outputs, dict) else outputs
        last = _Stage("outputs", np.asarray(outputs, np.float32), _numbers(_output(pretrained, answer)))
        where = f"{path}: {{}} transformers {transformers.__version__} {{}} {last.difference:.0e} of the range of the "
        where += "outputs, first differing layer: {}"
        if last.difference <= _DIFFERS:
            return where.format("equal to", "to", "none")
        first = next((stage.name for stage in _stages(pretrained, ours, answer) if stage.difference > _DIFFERS), None)
    raise CheckpointError(where.format("differs from", "by", first or "the last, or the head"))


def _opened(torch: Any, transformers: Any, pretrained: Pretrained) -> Any:
    """The model in transformers, in float32.

    Raises:
        ConfigError: transformers has no such class, or cannot open the files.
    """
    path, head = pretrained.path, pretrained.config.model_dump().get("head") or {"kind": "language_model"}
    unsaid = "AutoModelForCausalLM" if head["kind"] == "language_model" else "AutoModel"
    name = (pretrained.published.source.config.get("architectures") or [unsaid])[0]
    place: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.suffix == ".gguf":
        place = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    elif not (path / "config.json").is_file():
        raise ConfigError(f"--check cannot compare {path}: transformers opens no model without a config.json")
    opener = getattr(transformers, name, None) if isinstance(name, str) else None
    if opener is None:
        raise ConfigError(f"--check cannot compare {path}: transformers {transformers.__version__} has no {name}")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        return opener.from_pretrained(**place, dtype=torch.float32, attn_implementation="eager").eval()
    except Exception as error:  # whatever transformers raises is what keeps it from being compared
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"--check cannot compare {path}: transformers does not open it: {said}") from None


def _inputs(pretrained: Pretrained) -> tuple[Any, dict[str, np.ndarray]]:
    """The same inputs as our model and as theirs takes them."""
    generator, settings = np.random.default_rng(0), pretrained.config.model_dump()
    if "vocab_size" not in settings:
        size = settings.get("image_size", 224)
        image = generator.standard_normal((1, settings.get("channels", 3), size, size), np.float32)
        return jnp.asarray(image.transpose(0, 2, 3, 1)), {"pixel_values": image}
    length, vocabulary = min(_TOKENS, settings["max_sequence_length"]), settings["vocab_size"]
    tokens = generator.integers(min(_FIRST_TOKEN, vocabulary - 1), vocabulary, (2, 1, length))
    # A classifier reads the last token that is no padding.
    padding = pretrained.published.source.config.get("pad_token_id")
    usable = [token for token in (*range(_FIRST_TOKEN, vocabulary), 0) if token != padding]
    tokens = np.where(tokens == (-1 if padding is None else padding), usable[0], tokens)
    if isinstance(pretrained.config, EncoderDecoderConfig):
        ours = {"tokens": jnp.asarray(tokens[0]), "decoder_tokens": jnp.asarray(tokens[1])}
        return ours, {"input_ids": tokens[0], "decoder_input_ids": tokens[1]}
    return jnp.asarray(tokens[0]), {"input_ids": tokens[0]}


def _output(pretrained: Pretrained, answer: Any) -> Any:
    """What transformers computes of what our model gives."""
    if "logits" in answer:
        return answer.logits
    head = pretrained.config.model_dump()["head"]
    if head["hidden"] is not None:
        return answer.pooler_output
    hidden = answer.last_hidden_state
    return {"first": hidden[:, 0], "last": hidden[:, -1], "mean": hidden.mean(1)}[head["pooling"]]


def _stages(pretrained: Pretrained, ours: Any, answer: Any) -> Iterator[_Stage]:
    """The residual stream before the first layer and after each; of an encoder-decoder, what its encoder gives."""
    if isinstance(pretrained.config, EncoderDecoderConfig):
        config, vocabulary = pretrained.config, pretrained.config.vocab_size
        assert vocabulary is not None
        graph, template = nnx.split(nnx.eval_shape(lambda: EncoderDecoder(config, vocabulary, Remat(), nnx.Rngs(0))))
        memory = nnx.merge(graph, from_dict(template, pretrained.params)).encode(ours["tokens"], None, None)
        yield _Stage("one of the encoder", np.asarray(memory), _numbers(answer.encoder_last_hidden_state))
        yield _Stage("one of the decoder", np.zeros(1), np.ones(1))  # what is left
        return
    # The last of theirs may be behind the last norm.
    theirs = [] if answer.get("hidden_states") is None else answer.hidden_states[:-1]
    for number, (own, state) in enumerate(zip(_hidden_states(pretrained, ours), theirs, strict=False)):
        yield _Stage("the embedding" if number == 0 else f"layer {number - 1}", own, _numbers(state))


def _hidden_states(pretrained: Pretrained, inputs: jax.Array) -> Iterable[np.ndarray]:
    parts, params = pretrained.model.parts, pretrained.params
    if parts is None:
        return
    rest = {name: value for name, value in params.items() if name != parts.stack}
    carry = parts.embed(rest, inputs, key=None, train=False)
    yield _residual(carry)
    for layer in range(parts.num_layers):
        one = jax.tree.map(lambda leaf, layer=layer: leaf[layer : layer + 1], params[parts.stack])
        carry = parts.layers(one, carry, inputs, first_layer=layer, key=None, train=False)
        yield _residual(carry)


def _residual(carry: Any) -> np.ndarray:
    return np.asarray(carry["x"] if isinstance(carry, dict) else carry, np.float32)


def _numbers(tensor: Any) -> np.ndarray:
    return tensor.float().numpy()
