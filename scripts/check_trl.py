"""Train a committed published folder on pairs of answers with jaxtrain and with TRL, and compare the losses.

    JAX_PLATFORMS=cpu python scripts/check_trl.py ours FILE
    ORACLE/bin/python scripts/check_trl.py theirs FILE

ORACLE is an environment with `pip install 'jaxtrain[oracle]'`. Both train all weights of
tests/interop/published/llama in float32 by DPO with beta 0.1: Adam, the same pairs of random tokens in the same order,
no clipping, one learning rate. The first line writes its losses to FILE (.npz); the second prints the losses of both
and ends with exit code 1 where one of them differs by more than 1e-4.
"""

# The imports of each half are installed in its own environment only.
# pyright: reportMissingImports=false, reportMissingModuleSource=false
import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
FOLDER = HERE.parent / "tests" / "interop" / "published" / "llama"
STEPS, PAIRS, VOCABULARY, LENGTH, RATE, BETA = 6, 4, 40, 16, 1e-2, 0.1
# float32 here and there, six steps of Adam apart.
TOLERANCE = 1e-4


def rows() -> list[dict[str, list[int]]]:
    """The pairs: a prompt and two answers of several lengths."""
    draw = np.random.default_rng(0)

    def some(least: int, most: int) -> list[int]:
        return draw.integers(3, VOCABULARY, int(draw.integers(least, most + 1))).tolist()

    return [
        {"prompt_ids": some(2, 6), "chosen_ids": some(2, 8), "rejected_ids": some(2, 8)} for _ in range(STEPS * PAIRS)
    ]


def ours(file: Path) -> int:
    """Train with jaxtrain."""
    import jax
    import optax

    import jaxtrain as jt

    given = rows()
    inputs, targets = np.zeros((2, len(given), 2, LENGTH), np.int32)
    weights = np.zeros((len(given), 2, LENGTH), np.float32)
    for k, row in enumerate(given):
        for side, name in enumerate(("chosen_ids", "rejected_ids")):
            tokens, start = row["prompt_ids"] + row[name], len(row["prompt_ids"])
            inputs[k, side, : len(tokens) - 1], targets[k, side, : len(tokens) - 1] = tokens[:-1], tokens[1:]
            weights[k, side, start - 1 : len(tokens) - 1] = 1
    pretrained = jt.load_pretrained(FOLDER)
    mesh = jt.make_mesh(devices=jax.devices()[:1])
    step = jt.make_train_step(pretrained.model, jt.dpo(beta=BETA), optax.adam(RATE), mesh=mesh)
    state = step.init(0, params=str(FOLDER))
    data = jt.reference_rows(
        step, state, jt.ArrayRows({"inputs": inputs, "targets": targets, "weights": weights}), batch_size=PAIRS
    )
    losses = []
    for k in range(STEPS):
        batch = [data[PAIRS * k + place] for place in range(PAIRS)]
        state, metrics = step(state, {name: np.stack([row[name] for row in batch]) for name in batch[0]})
        losses.append(float(metrics["loss"]))
    np.savez(file, losses=losses)
    print(losses)
    return 0


def theirs(file: Path) -> int:
    """Train with TRL, and compare."""
    import datasets
    import tokenizers
    import torch
    import transformers
    import trl

    class Trainer(trl.DPOTrainer):
        """Takes tokens as they are, in their order."""

        def _prepare_dataset(self, dataset, *others, **more):
            return dataset

        def _get_train_sampler(self, *others):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(k): k for k in range(VOCABULARY)}, unk_token="0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.DPOConfig(
            output_dir=folder,
            beta=BETA,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            per_device_train_batch_size=PAIRS,
            max_steps=STEPS,
            max_grad_norm=0,
            optim="adamw_torch",
            weight_decay=0.0,
            logging_steps=1,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        model = transformers.LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
        trainer = Trainer(
            model, args=settings, train_dataset=datasets.Dataset.from_list(rows()), processing_class=tokenizer
        )
        # The log rounds its losses: what each step computes is kept as it is.
        losses, compute = [], trainer.compute_loss

        def kept(*given, **more):
            found = compute(*given, **more)
            losses.append(float(found[0] if isinstance(found, tuple) else found))
            return found

        trainer.compute_loss = kept
        trainer.train()
    wanted = np.load(file)["losses"]
    print(f"TRL {trl.__version__}, torch {torch.__version__}")
    for k, (one, two) in enumerate(zip(wanted, losses, strict=True)):
        print(f"step {k}: {one:.7f} ours, {two:.7f} TRL, {abs(one - two):.1e} apart")
    return int(np.abs(wanted - losses).max() > TOLERANCE)


def main() -> None:
    """Run one half."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("half", choices=["ours", "theirs"])
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    sys.exit({"ours": ours, "theirs": theirs}[arguments.half](arguments.file))


if __name__ == "__main__":
    main()
