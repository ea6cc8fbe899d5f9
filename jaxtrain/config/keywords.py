"""Keywords as other libraries spell them: a call with an unknown one says what is meant. No jax here."""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

# What people write -> what it is here; suggested where the function has an argument of that name.
_MEANT = {
    **dict.fromkeys(("validation_split", "val_split", "validation_fraction"), "validation=0.1"),
    **dict.fromkeys(("validation_data", "val_data", "valid", "eval_data", "eval_dataset"), "validation="),
    **dict.fromkeys(("num_epochs", "n_epochs", "max_epochs", "nb_epoch", "num_train_epochs", "epoch"), "epochs="),
    **dict.fromkeys(("num_steps", "max_steps", "total_steps", "num_train_steps", "iterations"), "steps="),
    **dict.fromkeys(("batch", "bs", "global_batch_size", "per_device_train_batch_size"), "batch_size="),
    **dict.fromkeys(("dataset", "train_data", "train_dataset", "train_dataloaders", "x"), "data="),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clip_val", "clip"), "clip_norm="),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "accumulation_steps="),
    **dict.fromkeys(("precision", "dtype", "mixed_precision"), 'policy="bf16"'),
    **dict.fromkeys(("output_dir", "log_dir", "logdir", "save_dir", "workdir", "default_root_dir"), "run_dir="),
    **dict.fromkeys(("random_state", "random_seed"), "seed="),
    **dict.fromkeys(("lr", "weight_decay"), "optimizer=optax.adamw(1e-3, weight_decay=0.01)"),
    **dict.fromkeys(("early_stopping", "patience"), "callbacks=[jt.EarlyStopping(patience=3)]"),
    **dict.fromkeys(("verbose", "verbosity"), 'logging={"every": 100}'),
    **dict.fromkeys(("criterion", "loss_fn", "loss"), "task=jt.classification()"),
    "metrics": 'task=jt.classification(metrics=["accuracy", "f1"])',
    **dict.fromkeys(("save_best", "save_best_only", "restore_best_weights"), 'checkpoint={"keep_best": True}'),
    **dict.fromkeys(("resume_from_checkpoint", "ckpt_path", "checkpoint_dir"), "run_dir="),
    **dict.fromkeys(("devices", "strategy", "accelerator"), "mesh=jt.make_mesh(data=2, fsdp=4)"),
    "monitor": "metric=",
    "save_every": 'checkpoint={"every": 100}',
    "eval_every": 'evaluation={"every": 100}',
}


Target = TypeVar("Target", bound=Callable[..., Any])


def suggesting(target: Target) -> Target:
    """The function or class, which says of an unknown keyword what is meant: the one decorator of what is public."""
    parameters = inspect.signature(target).parameters
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return target
    is_class = isinstance(target, type)
    call: Any = target.__init__ if is_class else target

    @functools.wraps(call)
    def called(*arguments: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in parameters:
                raise TypeError(f"{target.__name__} has no argument {name!r}{_hint(name, list(parameters))}")
        return call(*arguments, **keywords)

    if is_class:
        cast(Any, target).__init__ = called
    return cast(Target, target if is_class else called)


def _hint(name: str, known: list[str]) -> str:
    meant = _MEANT.get(name.lower(), "")
    if meant.partition("=")[0] in known:
        return f"; write {meant}{'...' if meant.endswith('=') else ''}"
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; it takes {', '.join(known) or 'none'}"
