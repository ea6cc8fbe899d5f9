"""What a fixture is, and how its weights and its expected arrays are made from the model of transformers.

Arrays of expected.npz (B rows, L tokens, V outputs, D hidden):
    tokens [B, L], attention_mask [B, L] (1: a token, 0: padding), token_type_ids [B, L], decoder_tokens [B, T],
    pixel_values [B, C, H, W]: the inputs, int64 or float32.
    logits: outputs [B, L, V], [B, T, V], [B, V] or, of CLIP, [2, B, B]; last_hidden_state [B, L, D] and pooled [B, D]
        of a model without a head. What stands at padded positions is whatever transformers computes there: compare
        where the mask is 1.
    labels: the target of each row of logits, -100 where none counts; loss: the sum of the cross-entropies, float32.
    grad:NAME: the gradient of `loss` with respect to the tensor NAME of model.safetensors, in its shape there.
    prompt [B, P] and generated [B, P + N]: greedy tokens with a cache, the prompt included. For an encoder-decoder:
    generated [B, 1 + N] from `tokens`, where the first is the start token.
    A name that ends in _long: the same for a sequence longer than original_max_position_embeddings.
"""

# Its imports are installed in the environment of the oracle only.
# pyright: reportMissingImports=false, reportMissingModuleSource=false
import copy
import tempfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch.nn.functional import cross_entropy

IGNORED = -100
Arrays = dict[str, np.ndarray]

# Buffers that follow from the config.
_FOLLOWS = ("embed_scale", "embed_positions")


class Unsuitable(Exception):
    """Random weights that would not prove what a fixture is for; the next seed may do better."""


def near_the_dip(up: str, down: str) -> dict[str, tuple[float, float]]:
    """Say what weights of an MLP tell the exact GELU from its approximation, for `Fixture.special`.

    The two differ by 5e-4 at most, near -2.2, where GELU itself is -0.03: elsewhere the difference is lost beside it.

    Args:
        up: end of the name of the first linear layer.
        down: end of the name of the second one.
    """
    return {f"{up}.bias": (-2.2, 0.5), f"{up}.weight": (0.0, 0.1), f"{down}.weight": (0.0, 2.0)}


@dataclass(frozen=True)
class Fixture:
    """A tiny checkpoint of one family.

    Attributes:
        name: its folder under tests/weights/published/.
        architecture: class of transformers.
        config: config of transformers.
        expect: model, fixture and random generator -> the arrays of expected.npz but for the gradients.
        gradients: names of tensors of the file whose gradient is kept.
        matters: changes of the config; each must move the outputs, so that a reader that drops the setting fails.
        length: tokens in a row of `tokens`.
        prompt: tokens in a prompt.
        gain: standard deviation of a kernel's outputs for inputs of standard deviation 1.
        special: end of a tensor's name in the model -> mean and standard deviation of its values.
        old: config of transformers 5 as JSON -> as transformers 4 wrote it, or None for no config_old.json.
        prepare: changes the model before its weights are made, such as an output that is not tied.
        published: config as transformers writes it -> as the published files have it, where these differ.
    """

    name: str
    architecture: Any
    config: Any
    expect: Callable[["Fixture", Any, np.random.Generator], Arrays]
    gradients: tuple[str, ...] = ()
    matters: tuple[Mapping[str, Any], ...] = ()
    length: int = 12
    prompt: int = 5
    gain: float = 1.4
    special: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    old: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    prepare: Callable[[Any], None] | None = None
    published: Callable[[dict[str, Any]], dict[str, Any]] | None = None


def make_model(fixture: Fixture, seed: int) -> Any:
    """Make the model with random weights: scales of norms around 1, biases that are not 0, running statistics."""
    model = fixture.architecture._from_config(fixture.config, attn_implementation="eager").float().eval()
    if fixture.prepare is not None:
        fixture.prepare(model)
    seen: set[int] = set()
    with torch.no_grad():
        for path, module in model.named_modules():
            tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for name, tensor in tensors:
                if id(tensor) in seen or not tensor.is_floating_point() or name in _FOLLOWS or "inv_freq" in name:
                    continue
                seen.add(id(tensor))
                generator = np.random.default_rng([seed, zlib.crc32(f"{path}.{name}".encode())])
                values = random_values(type(module).__name__, name, tuple(tensor.shape), generator, fixture.gain)
                for end, (mean, deviation) in fixture.special.items():
                    if f"{path}.{name}".endswith(end):
                        values = mean + deviation * generator.standard_normal(tuple(tensor.shape))
                tensor.copy_(torch.from_numpy(np.asarray(values, np.float32)))
    return model


def random_values(
    module: str, name: str, shape: tuple[int, ...], generator: np.random.Generator, gain: float
) -> np.ndarray:
    """Draw the values of a parameter, by the class of its module.

    Args:
        module: name of the class of the module.
        name: of the parameter in its module.
        shape: of the parameter.
        generator: random generator.
        gain: standard deviation of a kernel's outputs for inputs of standard deviation 1.
    """
    normal = generator.standard_normal(shape)
    if name == "running_var":
        return np.exp(0.5 * normal)
    if "Norm" in module and name == "weight":
        return 0.3 * normal + (0.0 if module.startswith("Gemma") else 1.0)  # Gemma's files hold the scale less 1
    if "bias" in name or "Norm" in module:
        return 0.3 * normal
    if module == "Embedding" or len(shape) < 2 or name in ("cls_token", "position_embeddings"):
        return 0.7 * normal
    if module == "Conv1D":
        fan_in = shape[0]
    elif module == "Conv2d":
        fan_in = int(np.prod(shape[1:]))
    else:
        fan_in = shape[-1]
    return gain / fan_in**0.5 * normal


def sum_of_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum the cross-entropies of the labels that are not -100."""
    return cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=IGNORED)


def numbers(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array."""
    return tensor.detach().numpy().copy()


def inputs_of(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return the arguments of the model that the arrays hold."""
    arguments = {
        "tokens": "input_ids", "attention_mask": "attention_mask", "token_type_ids": "token_type_ids",
        "decoder_tokens": "decoder_input_ids", "pixel_values": "pixel_values",
    }  # fmt: skip
    return {theirs: torch.from_numpy(arrays[ours]) for ours, theirs in arguments.items() if ours in arrays}


def logits_of(answer: Any) -> torch.Tensor:
    """Return the logits; of CLIP [2, B, B], of each image's texts and of each text's images."""
    return answer.logits if "logits" in answer else torch.stack([answer.logits_per_image, answer.logits_per_text])


def outputs_of(model: Any, arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Compute the outputs that a fixture keeps, for the inputs among `arrays`."""
    with torch.no_grad():
        answer = model(**inputs_of(arrays), return_dict=True)
    if "logits" in answer or "logits_per_image" in answer:
        return {"logits": numbers(logits_of(answer))}
    return {"last_hidden_state": numbers(answer.last_hidden_state), "pooled": numbers(answer.pooler_output)}


def gradients_of(fixture: Fixture, model: Any, arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Compute the loss and the gradients of the tensors that the fixture names, by their names in the file."""
    if not fixture.gradients:
        return {}
    model.zero_grad(set_to_none=True)
    loss = sum_of_cross_entropy(logits_of(model(**inputs_of(arrays))), torch.from_numpy(arrays["labels"]))
    loss.backward()
    # A copy whose parameters are the gradients is written as any model is, so that the gradients get the file's names.
    gradients = copy.deepcopy(model)
    with torch.no_grad():
        for of_gradient, parameter in zip(gradients.parameters(), model.parameters(), strict=True):
            of_gradient.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    with tempfile.TemporaryDirectory() as folder:
        gradients.save_pretrained(folder)
        stored = load_file(Path(folder) / "model.safetensors")
    found: Arrays = {f"grad:{name}": stored[name] for name in fixture.gradients}
    if not all(np.abs(gradient).max() > 1e-3 for gradient in found.values()):
        raise Unsuitable(f"{fixture.name}: a gradient is 0")
    return found | {"loss": np.asarray(loss.item(), np.float32)}


def move_of(fixture: Fixture, model: Any, arrays: Mapping[str, np.ndarray], change: Mapping[str, Any]) -> float:
    """Compute how far a change of the config moves the outputs, as a share of their range."""
    config = type(fixture.config)(**{**fixture.config.to_dict(), **change})
    other = fixture.architecture._from_config(config, attn_implementation="eager").float().eval()
    if fixture.prepare is not None:
        fixture.prepare(other)
    other.load_state_dict(model.state_dict(), strict=False)
    return max(distances(outputs_of(model, arrays), outputs_of(other, arrays)))


def distances(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> list[float]:
    """Compute the largest difference of each array as a share of its range."""
    return [float(np.abs(one[name] - other[name]).max() / np.ptp(one[name])) for name in one]


def padded(generator: np.random.Generator, length: int, vocabulary: int, pad: int) -> Arrays:
    """Draw tokens [2, length] and their mask; the second row ends in 4 places of padding."""
    tokens = generator.integers(4, vocabulary, (2, length))
    mask = np.ones_like(tokens)
    tokens[1, -4:], mask[1, -4:] = pad, 0
    return {"tokens": tokens, "attention_mask": mask}


def generate(model: Any, inputs: torch.Tensor, *, length: int, **arguments: Any) -> np.ndarray:
    """Generate greedily with a cache, and refuse answers that rounding could change or that say nothing.

    Args:
        model: of transformers.
        inputs: prompts [B, P], or the encoder's tokens.
        length: tokens to generate.
        arguments: further arguments of the model, such as its attention mask.

    Raises:
        Unsuitable: the best two tokens are close somewhere, or a row holds fewer than 4 different tokens.
    """
    # No token ends the answer, or its length would depend on the weights.
    model.generation_config.eos_token_id = None
    answer = model.generate(
        inputs, max_new_tokens=length, do_sample=False, use_cache=True, return_dict_in_generate=True,
        output_scores=True, **arguments,
    )  # fmt: skip
    scores = torch.stack(answer.scores)
    best = scores.topk(2).values
    if (best[..., 0] - best[..., 1]).min() < 5e-3 * (scores.max() - scores.min()):
        raise Unsuitable("two tokens are close")
    if any(len(set(row[-length:].tolist())) < 4 for row in answer.sequences):
        raise Unsuitable("the answer repeats itself")
    return numbers(answer.sequences)
