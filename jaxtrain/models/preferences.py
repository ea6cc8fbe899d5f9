"""Tasks on pairs of answers, of which one is preferred: direct preference optimization and reward models.

Shapes: B pairs, L sequence, V vocabulary. Dim 1 of each entry of a batch counts the two answers, the chosen one first;
a row of the model is one answer with its prompt, so that the model gets 2 B rows.
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.arguments import shown
from jaxtrain.config.schema import LossConfig
from jaxtrain.errors import ConfigError
from jaxtrain.models.task import Batch, CallingLoss, ModelCall, Task, checked_ids, target_weights
from jaxtrain.ops.loss.blocks import Logits
from jaxtrain.ops.loss.cross_entropy import cross_entropy

_AXES = {key: ("batch", None, "sequence") for key in ("inputs", "targets", "weights")}
_IDS = ("inputs", "targets")


def dpo(
    beta: float = 0.1,
    *,
    label_smoothing: float = 0.0,
    logits: Literal["auto", "whole", "tokens", "vocabulary"] = "auto",
    block: int | None = None,
) -> Task:
    """Prefer chosen answers to rejected ones, and stay near the model that training starts from.

    The loss of a pair is -log sigmoid(m) with the margin m = beta ((c - c0) - (r - r0)): c and r are the
    log-probabilities of the chosen and of the rejected answer, summed over their tokens in float32, and c0 and r0 those
    by the model that training starts from, of whose trained parameters the state keeps a copy. It is ln 2 at first.
    Source: Rafailov et al. 2023 (arXiv 2305.18290).

    A batch holds `inputs` int32 [B, 2, L] (or a dict of such entries, as a transformer takes), `targets` int32
    [B, 2, L], and `weights` [B, 2, L], which are 0 on what is no answer; the largest weight of a pair weighs the pair.
    The accuracy is the share of the pairs whose margin is above 0. Rewards are beta (c - c0) and beta (r - r0).
    `router_loss` and z-loss are not added. On `pipe` > 1 the task is refused.

    Args:
        beta: above 0; the larger, the nearer the model stays to where it starts.
        label_smoothing: probability that a pair is labelled the wrong way round, from 0 to below 0.5.
        logits, block: as for `language_modeling`.

    Raises:
        ConfigError: a number out of range, or a block size for logits that are not partitioned.

    Example:
        >>> task = jt.dpo(beta=0.2)
        >>> task.batch_axes["targets"]
        ('batch', None, 'sequence')
    """
    LossConfig(beta=beta, label_smoothing=label_smoothing, logits=logits, block=block)
    by = None if logits == "auto" else logits

    def loss(apply: ModelCall, batch: Batch, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        logs_B2 = answer_log_probabilities(apply, batch, by=by, size=block)
        reference_B2 = answer_log_probabilities(apply.reference, batch, by=by, size=block)
        rewards_B2 = beta * (logs_B2 - reference_B2)
        margin_B = rewards_B2[:, 0] - rewards_B2[:, 1]
        losses_B = -(1 - label_smoothing) * jax.nn.log_sigmoid(margin_B)
        if label_smoothing:
            losses_B = losses_B - label_smoothing * jax.nn.log_sigmoid(-margin_B)
        return losses_B, {
            "accuracy": margin_B > 0,
            "margin": margin_B,
            "chosen_reward": rewards_B2[:, 0],
            "rejected_reward": rewards_B2[:, 1],
        }

    calling = CallingLoss(loss, reference=True, ids=_IDS)
    return Task("dpo", calling, _AXES, reads_weights=True)


def reward() -> Task:
    """Score answers so that chosen ones are above rejected ones: a reward model.

    The loss of a pair is -log sigmoid(s_c - s_r) (Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155). The
    model gives one number per text, float [B, 1] or [B]: a transformer with `model.head` of kind regression or
    sequence, `num_labels` 1 and `pooling` last. It gets the inputs as a dict: `tokens` [2 B, L] and `segments`, 1 up to
    the token that ends the answer and 0 after it, so that the last token is that one.

    A batch is one of `dpo`. The accuracy is the share of the pairs with s_c above s_r.

    Example:
        >>> jt.reward()
        Task 'reward'
    """
    return Task("reward", CallingLoss(_reward_loss, ids=_IDS), _AXES, reads_weights=True)


def _reward_loss(apply: ModelCall, batch: Batch, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    _check_pairs("reward", batch)
    inputs = batch["inputs"]
    if not isinstance(inputs, Mapping):
        inputs = {"tokens": inputs}
    num_pairs, _, length = batch["targets"].shape
    places_L = jnp.arange(length)
    is_answer_B2L = target_weights(batch) != 0
    last_target_B2 = jnp.max(jnp.where(is_answer_B2L, places_L, 0), axis=-1)
    # The target of the last answer token is the input one place on, unless the row ends there.
    last_input_B2 = jnp.minimum(last_target_B2 + 1, length - 1)
    segments_B2L = (places_L <= last_input_B2[..., None]).astype(jnp.int32)
    scores = apply(_answers({**inputs, "segments": segments_B2L}))
    num_texts = 2 * num_pairs
    if getattr(scores, "shape", None) not in ((num_texts,), (num_texts, 1)):
        raise ConfigError(
            f"reward needs one number per text from the model, which gives {shown(scores)} for {num_texts} texts; give "
            "it a head with one output (model.head.kind=regression model.head.num_labels=1 model.head.pooling=last)"
        )
    scores_B2 = scores.astype(jnp.float32).reshape(num_pairs, 2)
    margin_B = scores_B2[:, 0] - scores_B2[:, 1]
    return -jax.nn.log_sigmoid(margin_B), {
        "accuracy": margin_B > 0,
        "margin": margin_B,
        "chosen_score": scores_B2[:, 0],
        "rejected_score": scores_B2[:, 1],
    }


def answer_log_probabilities(
    apply: ModelCall, batch: Batch, *, by: Logits | None = None, size: int | None = None
) -> jax.Array:
    """Compute the log-probability of each answer of a batch of pairs, summed over its tokens.

    Losses of `Task.calling` on pairs begin with it: DPO, IPO, ORPO and SimPO differ in what they do with these numbers.

    Args:
        apply: the model, as a loss of `Task.calling` gets it.
        batch: `inputs`, `targets` and `weights` [B, 2, L], as for `dpo`; tokens count where their weight is not 0.
        by, size: how deferred logits are partitioned into blocks, as for `cross_entropy`; None: from their sizes.

    Returns:
        float32 [B, 2], NaN for an answer with an id that the model does not have.

    Raises:
        ConfigError: a batch without pairs, or a model without logits of a vocabulary.

    Example:
        >>> def loss(apply, batch, key):  # of SimPO, whose reward is the mean over tokens
        ...     logs = jt.answer_log_probabilities(apply, batch) / jnp.sum(batch["weights"], axis=-1)
        ...     return -jax.nn.log_sigmoid(2.0 * (logs[:, 0] - logs[:, 1]) - 0.5), {}
        >>> jt.Task.calling("simpo", loss)
        Task 'simpo'
    """
    _check_pairs("answer_log_probabilities", batch)
    outputs = apply.deferred(_answers(batch["inputs"]))
    logits: Any = outputs
    if isinstance(outputs, Mapping):
        logits = outputs.get("logits")
    answers = {"targets": _answers(batch["targets"]), "weights": _answers(target_weights(batch))}
    targets, weights = checked_ids("answer_log_probabilities", logits, answers)
    losses = cross_entropy(logits, targets, by=by, size=size)
    # Selected and not multiplied: 0 times an infinite loss is NaN. A weight of NaN marks an id that the model does not
    # have.
    losses = jnp.where(jnp.isnan(weights), jnp.nan, losses)
    losses = jnp.where(weights == 0, 0.0, losses)
    return -jnp.sum(losses, axis=-1).reshape(-1, 2)


def _answers(tree: Any) -> Any:
    """Reshape entries [B, 2, ...] to [2 B, ...]: the two answers of a pair one behind the other, on one device."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)


def _check_pairs(name: str, batch: Batch) -> None:
    """Raise a `ConfigError` where inputs and targets of a batch are not [B, 2, L]."""
    targets: Any = batch.get("targets")
    shapes = [np.shape(targets)]
    shapes += [leaf.shape for leaf in jax.tree.leaves(batch.get("inputs"))]
    if len(set(shapes)) > 1 or len(shapes[0]) != 3 or shapes[0][1] != 2:
        entries = ", ".join(f"{entry} {shown(leaf)}" for entry, leaf in batch.items())
        raise ConfigError(
            f"{name} takes pairs of answers, inputs and targets int32 [pairs, 2, L] and weights of 1 on the tokens of "
            f"the answers, the chosen one first, but the batch has {entries or 'nothing'}; set data.kind=chat for pairs"
        )
