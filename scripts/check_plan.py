"""Predictions of the planner and measurements on this machine: state bytes and step time of configs.

    python scripts/check_plan.py bench_cpu quickstart "quickstart precision.policy=bf16"

It uses the GPU or TPU of this machine where that is in the catalogue; on a CPU the peak is measured first. It prints
one line per config and the median of the ratios.
"""

import argparse
import statistics
import sys
import time

import jax

from jaxtrain.config import load_config
from jaxtrain.data import Batches
from jaxtrain.plan.estimate import analyse
from jaxtrain.plan.targets import this_machine
from jaxtrain.runtime import distributed
from jaxtrain.train.assemble import assemble, open_run_data
from jaxtrain.train.state import TrainState

_STEPS = 7


def measured(state: TrainState) -> int:
    """Count the bytes of a state on the first device."""
    device = jax.devices()[0]
    arrays = [leaf for leaf in jax.tree.leaves(state) if not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    return sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards if shard.device == device)


def main(configs: list[str]) -> None:
    """Print predicted and measured figures."""
    distributed.start(compilation_cache=None)
    target = this_machine()
    if target is None:
        sys.exit(f"{jax.devices()[0].device_kind} is not in the catalogue (jaxtrain plan --list)")
    ratios = []
    for words in configs:
        name, *overrides = words.split()
        config = load_config(name, overrides=overrides).config
        estimate = analyse(config, target)
        assert estimate.time is not None
        data = open_run_data(config)
        run = assemble(config, data)
        state = run.step.init(0)
        batches = Batches(data.train, config.train.global_batch_size, seed=0, shuffle=True)
        load = run.step.loader(batches)
        run.step.compile(batches.spec())
        seconds = []
        state_bytes = measured(state)
        for k in range(_STEPS):
            batch = load(k)
            jax.block_until_ready((state.params, batch))
            began = time.perf_counter()
            state, _ = run.step(state, batch)
            jax.block_until_ready(state.params)
            seconds.append(time.perf_counter() - began)
        likely, truth = estimate.time.seconds, statistics.median(seconds)
        ratios.append(likely / truth)
        print(
            f"{words}: state {estimate.memory.state_bytes:,} of {state_bytes:,} bytes; step predicted "
            f"{likely * 1e3:.1f} ms ({estimate.time.low_seconds * 1e3:.1f} to {estimate.time.high_seconds * 1e3:.1f}), "
            f"measured {truth * 1e3:.1f} ms: {likely / truth:.2f} x",
            flush=True,
        )
    peaks = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in target.hardware.peak_flops.items())
    print(f"{target.hardware.title}: GFLOP/s {peaks}; {target.hardware.memory_bandwidth / 1e9:.1f} GB/s of memory")
    print(f"median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", default=["bench_cpu", "quickstart", "digits_mlp"])
    main(parser.parse_args().configs)
