"""jaxtrain: functional JAX training on NVIDIA GPUs, TPUs and CPUs with one pure, sharded train step.

A public name is imported when it is first used, so that `import jaxtrain` takes no time and does not start jax.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "ArrayRows": "jaxtrain.data.rows",
    "Batches": "jaxtrain.data",
    "Checkpointer": "jaxtrain.checkpoint",
    "CheckpointError": "jaxtrain.errors",
    "Config": "jaxtrain.config",
    "ConfigError": "jaxtrain.errors",
    "Data": "jaxtrain.data",
    "DataError": "jaxtrain.errors",
    "DivergedError": "jaxtrain.errors",
    "DrawsByRow": "jaxtrain.models.model",
    "Evaluator": "jaxtrain.run.evaluation",
    "JsonlWriter": "jaxtrain.metrics.writers",
    "Model": "jaxtrain.models.model",
    "Parallelism": "jaxtrain.train.parallelism",
    "Parts": "jaxtrain.models.model",
    "PreemptedError": "jaxtrain.errors",
    "Remat": "jaxtrain.remat.policy",
    "Result": "jaxtrain.run.result",
    "Sampling": "jaxtrain.inference.generate",
    "ShardedModel": "jaxtrain.models.sharded",
    "Task": "jaxtrain.models.tasks",
    "TrainState": "jaxtrain.train.state",
    "TrainStep": "jaxtrain.train.step",
    "UserError": "jaxtrain.errors",
    "build_model": "jaxtrain.models.shipped.build",
    "classification": "jaxtrain.models.tasks",
    "count_parameters": "jaxtrain.models.model",
    "elementwise": "jaxtrain.optim.elementwise",
    "embedding_lookup": "jaxtrain.ops.embedding",
    "from_functions": "jaxtrain.models.model",
    "from_linen": "jaxtrain.models.from_linen",
    "from_nnx": "jaxtrain.models.from_nnx",
    "from_stages": "jaxtrain.models.stages",
    "generate_text": "jaxtrain.inference.generate",
    "language_modeling": "jaxtrain.models.tasks",
    "load_config": "jaxtrain.config",
    "make_mesh": "jaxtrain.layout.mesh",
    "make_stack": "jaxtrain.models.stack",
    "make_train_step": "jaxtrain.train.step",
    "open_data": "jaxtrain.data",
    "open_run": "jaxtrain.run.open_run",
    "prefetch": "jaxtrain.data",
    "quantize": "jaxtrain.models.quantize",
    "regression": "jaxtrain.models.tasks",
    "run_config": "jaxtrain.run.trainer",
    "shard_model": "jaxtrain.train.parallelism",
    "target_weights": "jaxtrain.models.tasks",
}

__all__ = sorted([*_HOMES, "__version__"])


# Any: type checkers must accept every use of a public name.
def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxtrain' has no attribute {name!r}")

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
