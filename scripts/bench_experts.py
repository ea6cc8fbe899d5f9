"""A step of a small model of the shape of Mixtral, compared with the dense model that multiplies as much per token.

    JAX_PLATFORMS=cpu python scripts/bench_experts.py [--rounds 7] [--optimizer sgd]

8 experts of which a token meets 2, against MLPs of twice the width. The two steps run interleaved in one process; the
ratios are of medians, of the time of a clock and of the processor time of all threads. The steps differ by the router,
the sorting of tokens, the padding of blocks, and the optimizer's work on four times as many MLP weights. Plain SGD
reads and writes 12 bytes per parameter where AdamW does 28, so that `--optimizer sgd` shows about what forward and
backward pass cost. Memory is kept between steps, as under `jaxtrain train`.
"""

import argparse
import json
import resource
import statistics
import time

from jaxtrain.runtime.host import restart

EXPERTS, CHOICES = 8, 2


def processor_seconds() -> float:
    """Seconds that all threads of the process have computed."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--remat", default="dots")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    arguments = parser.parse_args()

    import jax
    import numpy as np
    import optax

    from jaxtrain import Remat, build_model, language_modeling, make_train_step

    # With asynchronous dispatch all 300,000 pages of the experts' temporaries were mapped anew in each step of this
    # script (jax 0.10.2), which the loop of `jaxtrain train` does not do.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    optimizers = {"adamw": optax.adamw(1e-3), "sgd": optax.sgd(1e-3)}
    hidden = round(3.5 * arguments.width)
    shape = dict(
        kind="transformer",
        num_layers=arguments.layers,
        embed_dim=arguments.width,
        num_heads=arguments.width // 64,
        num_kv_heads=2,
        activation="swiglu",
        max_sequence_length=arguments.length,
    )
    models = {
        "dense": shape | dict(mlp_dim=CHOICES * hidden),
        "experts": shape | dict(mlp_dim=hidden, experts=dict(num_experts=EXPERTS, experts_per_token=CHOICES)),
    }
    tokens = np.random.default_rng(0).integers(0, 2048, (arguments.batch, arguments.length + 1), dtype=np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    steps, states = {}, {}
    for name, config in models.items():
        model = build_model(config, input_shape=(arguments.length,), vocab_size=2048, remat=Remat(arguments.remat))
        steps[name] = make_train_step(model, language_modeling(), optimizers[arguments.optimizer])
        steps[name].compile(batch)
        states[name] = steps[name].init(0)
    seconds = {name: ([], []) for name in steps}
    metrics = {}
    for turn in range(arguments.rounds + 1):
        for name, step in steps.items():
            began = (time.perf_counter(), processor_seconds())
            states[name], metrics[name] = step(states[name], batch)
            jax.block_until_ready((states[name], metrics[name]))
            if turn:  # the first is a warm-up
                for values, end, start in zip(
                    seconds[name], (time.perf_counter(), processor_seconds()), began, strict=True
                ):
                    values.append(end - start)
    dense = [statistics.median(values) for values in seconds["dense"]]
    for name, values in seconds.items():
        clock, processor = (statistics.median(one) for one in values)
        row = {
            "model": name,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(states[name].params)),
            "step_seconds": round(clock, 4),
            "processor_seconds": round(processor, 4),
            "ratio": round(clock / dense[0], 3),
            "processor_ratio": round(processor / dense[1], 3),
            "loss": round(float(metrics[name]["loss"]), 4),
        }
        if "expert_busiest" in metrics[name]:
            row["expert_busiest"] = round(float(metrics[name]["expert_busiest"]), 3)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    restart(accelerator=False)
    main()
