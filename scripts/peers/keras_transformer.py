"""The same transformer in Keras 3 on JAX, trained by `fit`."""

# Its imports are installed in the environment of the peers only.
# pyright: reportMissingImports=false
import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from peer import (
    B1,
    B2,
    BATCH,
    CLIP,
    EPSILON,
    HEADS,
    LAYERS,
    LENGTH,
    NORM_EPSILON,
    VOCABULARY,
    WEIGHT_DECAY,
    WIDTH,
    batches,
    rates,
    serve,
    values,
)

SMALL = 0.02 / (2 * LAYERS) ** 0.5


def normal(stddev: float = 0.02):
    return keras.initializers.RandomNormal(stddev=stddev)


def dense(width: int, stddev: float = 0.02):
    return keras.layers.Dense(width, use_bias=False, kernel_initializer=normal(stddev))


def norm():
    return keras.layers.LayerNormalization(epsilon=NORM_EPSILON, center=False)


class Rates(keras.optimizers.schedules.LearningRateSchedule):
    """The learning rate of each step, from a table."""

    def __init__(self):
        self.table = rates()

    def __call__(self, step):
        return keras.ops.take(self.table, keras.ops.cast(step, "int32"))


def given(model: keras.Model) -> None:
    """Set the weights of the model to the given values; layers are taken in the order in which they were built."""
    ours = values()
    embedding, positions, *blocks, norm, output = [layer for layer in model.layers if layer.weights]
    attention = [f"attention/{name}/kernel" for name in ("query", "key", "value", "output")]
    paths = (["attention_norm/scale"], attention, ["mlp_norm/scale"], ["mlp/up/kernel"], ["mlp/down/kernel"])
    embedding.set_weights([ours["embedding"]])
    positions.set_weights([ours["positions"]])
    for number, layer in enumerate(blocks):
        names = paths[number % len(paths)]
        found = [ours[f"blocks/{name}"][number // len(paths)] for name in names]
        layer.set_weights([value.reshape(weight.shape) for value, weight in zip(found, layer.weights, strict=True)])
    norm.set_weights([ours["output_norm/scale"]])
    output.set_weights([ours["output"]])


class Positions(keras.layers.Layer):
    """Adds a learned vector for each place in the row."""

    def build(self, input_shape):
        self.positions = self.add_weight(shape=(LENGTH, WIDTH), initializer=normal())

    def call(self, inputs):
        return inputs + self.positions


def main() -> None:
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, WIDTH, embeddings_initializer=normal())(tokens)
    x = Positions()(x)
    for _ in range(LAYERS):
        y = norm()(x)
        attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS, use_bias=False, kernel_initializer=normal())
        x = x + attention(y, y, use_causal_mask=True)
        y = keras.ops.gelu(dense(4 * WIDTH)(norm()(x)), approximate=True)
        x = x + dense(WIDTH, SMALL)(y)
    logits = dense(VOCABULARY)(norm()(x))
    model = keras.Model(tokens, logits)
    optimizer = keras.optimizers.AdamW(
        Rates(), weight_decay=WEIGHT_DECAY, beta_1=B1, beta_2=B2, epsilon=EPSILON, global_clipnorm=CLIP
    )
    optimizer.exclude_from_weight_decay(var_names=["gamma"])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=True)
    given(model)
    rows = batches()

    def run(steps: int) -> float:
        inputs, targets = (np.concatenate(parts) for parts in zip(*(next(rows) for _ in range(steps)), strict=True))
        # The order of every peer.
        history = model.fit(inputs, targets, batch_size=BATCH, shuffle=False, verbose=0)
        return float(history.history["loss"][-1])  # the mean over the steps

    serve(run, parameters=model.count_params(), versions=f"keras {keras.__version__}, jax {jax.__version__}")


if __name__ == "__main__":
    main()
