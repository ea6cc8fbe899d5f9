"""jaxtrain's own loop on a shipped config, with its data, prefetch, compiled step and malloc settings, but no files.

python scripts/peers/ours.py bench_cpu [key=value ...]
"""

import sys
from pathlib import Path
from typing import Any

from peer import serve

from jaxtrain.config import load_config
from jaxtrain.runtime import distributed
from jaxtrain.runtime.host import restart


def main(name: str, overrides: list[str]) -> None:
    """Train the config of a name for as many steps as the driver asks for."""
    loaded = load_config(name, overrides=overrides)
    config = loaded.config
    distributed.start(compilation_cache=None)
    import jax

    from jaxtrain.data import prefetch
    from jaxtrain.data.configured import open_run_data
    from jaxtrain.run.assemble import assemble
    from jaxtrain.run.spec import RunSpec

    run_parts = assemble(RunSpec(loaded, Path("runs/unused")), open_run_data(config))
    step = run_parts.step
    step.compile(run_parts.batches.spec())
    state, done = step.init(config.seed), 0
    load = step.loader(run_parts.batches)

    def run(steps: int) -> float:
        nonlocal state, done
        loaded, losses = prefetch(load, done, done + steps, depth=2), []
        pending: Any = None
        try:
            for batch in loaded:
                state, metrics = step(state, batch)
                if pending is not None:  # read once the next step is dispatched
                    losses.append(float(pending["loss"]))
                pending = metrics
        finally:
            loaded.close()
        done += steps
        losses.append(float(pending["loss"]))
        jax.block_until_ready(state.params)
        return sum(losses) / steps

    serve(run, parameters=run_parts.num_parameters, versions=f"jax {jax.__version__}", remat=config.remat.policy)


if __name__ == "__main__":
    restart(accelerator=False)  # as `jaxtrain train` does
    main(sys.argv[1], sys.argv[2:])
