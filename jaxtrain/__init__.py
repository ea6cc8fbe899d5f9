"""jaxtrain: functional JAX training on NVIDIA GPUs, TPUs and CPUs with one pure, sharded train step.

A public name is imported when it is first used, so that `import jaxtrain` takes no time and does not start jax.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "ArrayRows": "jaxtrain.data.rows",
    "Batches": "jaxtrain.data",
    "Callback": "jaxtrain.run.callbacks",
    "CheckpointError": "jaxtrain.errors",
    "Checkpointer": "jaxtrain.checkpoint",
    "Config": "jaxtrain.config",
    "ConfigError": "jaxtrain.errors",
    "DEFAULT_RULES": "jaxtrain.layout.rules",
    "Data": "jaxtrain.data",
    "DataError": "jaxtrain.errors",
    "DeferredLogits": "jaxtrain.ops.loss.cross_entropy",
    "DivergedError": "jaxtrain.errors",
    "DrawsByRow": "jaxtrain.models.model",
    "EarlyStopping": "jaxtrain.run.callbacks",
    "EvaluationState": "jaxtrain.train.state",
    "Engine": "jaxtrain.inference.engine.engine",
    "EngineDead": "jaxtrain.inference.engine.request",
    "EngineFull": "jaxtrain.inference.engine.request",
    "Evaluator": "jaxtrain.run.evaluation",
    "JsonlWriter": "jaxtrain.metrics.writers",
    "LogitsLoss": "jaxtrain.models.task",
    "LoraConfig": "jaxtrain.config.schema",
    "LossScaling": "jaxtrain.precision.policy",
    "Model": "jaxtrain.models.model",
    "ModelCall": "jaxtrain.models.task",
    "Moment": "jaxtrain.run.callbacks",
    "Parallelism": "jaxtrain.train.parallelism",
    "Parts": "jaxtrain.models.model",
    "Policy": "jaxtrain.precision.policy",
    "PreemptedError": "jaxtrain.errors",
    "Pretrained": "jaxtrain.interop.pretrained",
    "Remat": "jaxtrain.remat.policy",
    "Request": "jaxtrain.inference.engine.request",
    "Result": "jaxtrain.run.run",
    "Sampling": "jaxtrain.inference.sampling",
    "ShardedModel": "jaxtrain.models.sharded",
    "SpikeRule": "jaxtrain.train.spikes",
    "Task": "jaxtrain.models.task",
    "TrainState": "jaxtrain.train.state",
    "TrainStep": "jaxtrain.train.step",
    "UserError": "jaxtrain.errors",
    "adapt": "jaxtrain.models.adapters",
    "answer_log_probabilities": "jaxtrain.models.preferences",
    "build_model": "jaxtrain.models.shipped.build",
    "build_step": "jaxtrain.train.assemble",
    "classification": "jaxtrain.models.tasks",
    "contrastive": "jaxtrain.models.tasks",
    "count_parameters": "jaxtrain.models.model",
    "cross_entropy": "jaxtrain.ops.loss.cross_entropy",
    "cross_entropy_sums": "jaxtrain.ops.loss.cross_entropy",
    "dpo": "jaxtrain.models.preferences",
    "dropout": "jaxtrain.models.layers",
    "elementwise": "jaxtrain.optim.wrappers",
    "embedding_lookup": "jaxtrain.ops.embedding",
    "fit": "jaxtrain.run.fit",
    "from_equinox": "jaxtrain.models.wrap",
    "from_functions": "jaxtrain.models.wrap",
    "from_linen": "jaxtrain.models.wrap",
    "from_models": "jaxtrain.models.wrap",
    "from_nnx": "jaxtrain.models.from_nnx",
    "from_stages": "jaxtrain.models.from_nnx",
    "generate_text": "jaxtrain.inference.generate",
    "get_policy": "jaxtrain.precision.policy",
    "is_main_process": "jaxtrain.runtime.distributed",
    "language_modeling": "jaxtrain.models.tasks",
    "load_config": "jaxtrain.config",
    "load_adapter": "jaxtrain.interop.peft",
    "load_pretrained": "jaxtrain.interop.pretrained",
    "make_mesh": "jaxtrain.layout.mesh",
    "make_stack": "jaxtrain.models.from_nnx",
    "make_train_step": "jaxtrain.train.step",
    "masked_language_modeling": "jaxtrain.models.tasks",
    "merge_adapters": "jaxtrain.models.adapters",
    "open_data": "jaxtrain.data",
    "open_run": "jaxtrain.run.open_run",
    "prefetch": "jaxtrain.data",
    "quantize": "jaxtrain.models.adapters",
    "reference_rows": "jaxtrain.train.reference",
    "regression": "jaxtrain.models.tasks",
    "reward": "jaxtrain.models.preferences",
    "run_config": "jaxtrain.run.run",
    "save_adapter": "jaxtrain.interop.peft",
    "save_pretrained": "jaxtrain.interop.pretrained",
    "sequence_to_sequence": "jaxtrain.models.tasks",
    "shard_model": "jaxtrain.train.parallelism",
    "start": "jaxtrain.runtime.distributed",
    "target_weights": "jaxtrain.models.task",
    "token_classification": "jaxtrain.models.tasks",
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
