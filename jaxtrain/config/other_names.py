"""Names that other trainers give to our keys, so that an error can suggest the right one. No jax here."""

from collections.abc import Sequence

# What to write here (a key, a key and its value, or a sentence) -> names elsewhere, in lower case and without group.
_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "optimizer.learning_rate": ("lr", "base_lr", "max_lr", "peak_lr", "base_learning_rate", "peak_learning_rate"),
    "optimizer.weight_decay": ("wd",),
    "optimizer.clip_norm": ("max_grad_norm", "grad_clip", "gradient_clip_val", "gradient_clipping", "clip_grad_norm"),
    "optimizer.ema_decay": ("ema",),
    "optimizer.kind": ("optim", "optimizer_name", "optimizer_type"),
    "optimizer.b1": ("beta1", "adam_beta1"),
    "optimizer.b2": ("beta2", "adam_beta2"),
    "optimizer.epsilon": ("eps", "adam_epsilon"),
    "optimizer.schedule.kind": ("scheduler", "lr_scheduler", "lr_scheduler_type", "lr_schedule"),
    "optimizer.schedule.warmup_steps": (
        "warmup",
        "num_warmup_steps",
        "warmup_iters",
        "warmup_ratio",
        "lr_warmup_steps",
    ),
    "train.steps": (
        *("max_steps", "num_steps", "total_steps", "train_steps", "num_train_steps", "max_train_steps"),
        *("iterations", "num_iterations", "max_iters"),
    ),
    "train.global_batch_size": (
        *("batch_size", "bs", "batchsize", "batch", "train_batch_size", "global_batch"),
        *("per_device_train_batch_size", "per_device_batch_size", "micro_batch_size"),
    ),
    "train.accumulation_steps": (
        *("gradient_accumulation_steps", "gradient_accumulation", "grad_accum", "grad_accum_steps"),
        *("accumulate_grad_batches", "accumulate_steps"),
    ),
    "train.workers": ("num_workers", "dataloader_num_workers", "n_workers"),
    "train.prefetch": ("prefetch_factor", "dataloader_prefetch_factor"),
    "model.num_layers": ("n_layer", "n_layers", "num_hidden_layers", "depth", "layers"),
    "model.embed_dim": ("hidden_size", "hidden_dim", "d_model", "n_embd", "embedding_dim"),
    "model.num_heads": ("n_head", "n_heads", "num_attention_heads"),
    "model.num_kv_heads": ("n_kv_heads", "num_key_value_heads"),
    "model.mlp_dim": ("intermediate_size", "ffn_dim", "d_ff"),
    "model.max_sequence_length": (
        *("max_length", "max_seq_length", "max_seq_len", "max_position_embeddings", "context_length", "n_positions"),
    ),
    "data.sequence_length": ("seq_len", "seq_length", "block_size"),
    "data.path": ("dataset", "data_dir", "data_path", "dataset_path", "train_file"),
    "checkpoint.every": ("save_steps", "save_every", "save_interval", "checkpoint_every"),
    "checkpoint.keep_last": ("save_total_limit", "max_to_keep"),
    "evaluation.every": ("eval_steps", "eval_every", "eval_interval"),
    "logging.every": ("logging_steps", "log_every", "log_interval", "log_steps"),
    "parallel.tensor": ("tp", "tp_size", "tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size"),
    "parallel.pipe": ("pp", "pp_size", "pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size"),
    "parallel.data": ("dp", "dp_size", "data_parallel", "data_parallel_size"),
    "parallel.context": ("cp", "cp_size", "context_parallel", "context_parallel_size"),
    "parallel.expert": ("ep", "ep_size", "expert_parallel", "expert_parallel_size"),
    "parallel.zero": ("zero_stage",),
    "seed": ("random_seed", "rng_seed"),
    "precision.policy": ("dtype", "compute_dtype", "param_dtype", "mixed_precision", "amp"),
    "precision.policy=fp32": ("fp32", "float32"),
    "precision.policy=tf32": ("tf32",),
    "precision.policy=bf16": ("bf16", "bfloat16"),
    "precision.policy=fp16": ("fp16", "float16", "half"),
    "precision.policy=fp8": ("fp8",),
    "remat.policy=full": (
        *("gradient_checkpointing", "grad_checkpointing", "activation_checkpointing", "checkpoint_activations"),
        *("use_remat", "recompute"),
    ),
    "a run counts steps: set train.steps to epochs x training rows / train.global_batch_size": (
        *("epochs", "num_epochs", "num_train_epochs", "max_epochs", "n_epochs", "train_epochs"),
    ),
    "the directory of a run is an option: --run-dir DIR (run_dir= in Python)": (
        *("run_dir", "output_dir", "out_dir", "save_dir", "log_dir", "logdir", "workdir"),
    ),
    "resuming is an option: --resume auto, must or never (resume= in Python)": (
        *("resume", "resume_from_checkpoint", "resume_from"),
    ),
}
_BY_NAME = {name: meant for meant, names in _OTHER_NAMES.items() for name in names}


def other_name(path: str, keys: Sequence[str]) -> str | None:
    """Returns what a key of another trainer is called here, or None for a name that none of them uses.

    Args:
        path: The key as the user wrote it, such as "lr" or "optimizer.lr".
        keys: The keys that exist in this config; a key that only another kind has is not suggested.

    Returns:
        A key ("train.steps"), a key and its value ("precision.policy=bf16"), or a sentence, which contains a space.
    """
    meant = _BY_NAME.get(path.rsplit(".", 1)[-1].lower().replace("-", "_"))
    if meant is None or " " in meant or meant.partition("=")[0] in keys:
        return meant
    return None
