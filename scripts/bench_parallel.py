"""Wasted work of layouts: the time of a step on emulated devices, compared with plain data parallelism.

Emulated devices share the cores, so that an idle device takes no time, and every repeated operation is visible in the
time of the step. The layouts run interleaved, and the ratios of medians are printed.

    python scripts/bench_parallel.py [--rounds 7] [--remat dots]
"""

import argparse
import json
import statistics
import time

from jaxtrain.runtime import distributed

# name -> degrees, options of Parallelism, accumulation steps
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, object], int]] = {
    "data=4": (dict(data=4), {}, 1),
    "data=4, 16 microbatches": (dict(data=4), {}, 16),
    "pipe=4 1f1b, 16 microbatches": (dict(pipe=4), dict(schedule="1f1b"), 16),
    "pipe=4 gpipe, 16 microbatches": (dict(pipe=4), dict(schedule="gpipe"), 16),
    "pipe=4 interleaved, 16 microbatches": (dict(pipe=4), dict(schedule="interleaved_1f1b"), 16),
    "tensor=4": (dict(tensor=4), {}, 1),
    "tensor=4 sequence parallel": (dict(tensor=4), dict(sequence_parallel=True), 1),
    "fsdp=4": (dict(fsdp=4), {}, 1),
    "context=4 ring": (dict(context=4), dict(context_attention="ring"), 1),
    "context=4 all_to_all": (dict(context=4), dict(context_attention="all_to_all"), 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--remat", default="dots")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--only", default="", help="part of a layout's name")
    arguments = parser.parse_args()
    distributed.start(emulate=4)

    import jax
    import numpy as np
    import optax

    from jaxtrain import Parallelism, Remat, build_model, language_modeling, make_mesh, make_train_step

    config = dict(
        kind="transformer",
        num_layers=arguments.layers,
        embed_dim=arguments.width,
        num_heads=8,
        max_sequence_length=arguments.length,
    )
    tokens = np.random.default_rng(0).integers(0, 2048, (arguments.batch, arguments.length + 1), dtype=np.int32)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    steps, states, seconds = {}, {}, {name: [] for name in LAYOUTS}
    chosen = {name: layout for name, layout in LAYOUTS.items() if arguments.only in name or name == "data=4"}
    for name, (degrees, options, accumulation) in chosen.items():
        model = build_model(config, input_shape=(arguments.length,), vocab_size=2048, remat=Remat(arguments.remat))
        mesh = make_mesh(**{"data": 1, **degrees})
        parallelism = Parallelism(**options)
        task, optimizer = language_modeling(), optax.adamw(1e-3)
        step = make_train_step(
            model, task, optimizer, mesh=mesh, accumulation_steps=accumulation, parallelism=parallelism
        )
        step.compile(batch)
        steps[name] = (step, jax.device_put(batch, step.batch_shardings(batch)))
        states[name] = step.init(0)
    for turn in range(arguments.rounds + 1):
        for name, (step, placed) in steps.items():
            began = time.perf_counter()
            states[name], metrics = step(states[name], placed)
            jax.block_until_ready((states[name], metrics))
            if turn:  # the first is a warm-up
                seconds[name].append(time.perf_counter() - began)
    base = statistics.median(seconds["data=4"])
    for name in chosen:
        median = statistics.median(seconds[name])
        print(json.dumps({"layout": name, "step_seconds": round(median, 4), "ratio": round(median / base, 3)}))


if __name__ == "__main__":
    main()
