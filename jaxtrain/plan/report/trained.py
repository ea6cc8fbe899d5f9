"""The rows of a plan on what is trained, and by what."""

import math

from jaxtrain.config.models import CalledModel
from jaxtrain.config.optimizers import CalledOptimizer
from jaxtrain.config.schema import Config
from jaxtrain.metrics.format import format_count
from jaxtrain.plan.search.estimate import Estimate
from jaxtrain.plan.workload.finetuned import finetuned
from jaxtrain.plan.workload.parameters import model_tensors


def finetuning(config: Config) -> str:
    """A fine-tuning in a few words: the rank of its adapters, and the format of what is below them."""
    lora, base = config.finetune.lora, config.finetune.base
    if lora is None:
        return "all parameters"
    doubled = "" if base != "nf4" or config.finetune.double_quantization else " without double quantization"
    return f"LoRA rank {lora.rank} over {base or 'float'} kernels{doubled}"


def trained_rows(estimate: Estimate) -> dict[str, str]:
    """What updates the parameters, and of a fine-tuning which of them are trained.

    Args:
        estimate: of the plan.
    """
    config, optimizer = estimate.config, estimate.config.optimizer
    if isinstance(optimizer, CalledOptimizer):
        rows = {"optimizer": optimizer.call}
    else:
        count = len(optimizer.groups)
        groups = f" and {count} group{'s' if count > 1 else ''} of parameters" if count else ""
        rows = {"optimizer": f"{optimizer.kind}{groups}"}
    if config.finetune.lora is None:
        return rows
    rows["fine-tuning"] = finetuning(config)
    if not isinstance(config.model, CalledModel):
        stored = finetuned(config, model_tensors(config.model, estimate.workload))
        trained = sum(math.prod(shape) for path, shape in stored.tensors.params.items() if path not in stored.frozen)
        share = 100 * trained / estimate.num_parameters
        rows["trained"] = f"{format_count(trained)} ({trained:,}), {share:.2g} % of the parameters"
    return rows
