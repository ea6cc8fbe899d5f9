"""Trains what a config describes with Ray: one worker per host, joined by Ray Train's JaxTrainer (alpha in Ray 2.60).

    pip install 'jaxtrain[cuda12]' 'ray[train]==2.60.0'
    python scripts/ray_train.py --workers 2 --gpus 8 --results /shared/ray -- \\
        llama3_8b train.accumulation_steps=4 --run-dir /shared/runs/llama

The words after `--` are those of `jaxtrain train`. The directories must be on a file system that all workers share. A
worker that is lost ends its group; Ray starts a new one, which resumes from the newest checkpoint. See docs/ray.md.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# A mistake in the config or data, and numbers that diverged: another start ends in the same way.
LASTING = (2, 3, 5)


def train_in_worker(settings: Mapping[str, Any]) -> None:
    """Runs in each worker, in which Ray has joined the processes already.

    Args:
        settings: `words` of jaxtrain, and `ended`, an actor that is told the exit code.

    Raises:
        RuntimeError: The run did not end well (75, stopped and saved, included), so that Ray starts the workers again.
            It counts a function that returns as success.
    """
    import ray  # pyright: ignore[reportMissingImports]
    import ray.train  # pyright: ignore[reportMissingImports]

    from jaxtrain.cli import main

    code = main(settings["words"])
    if ray.train.get_context().get_world_rank() == 0 or code:
        ray.get(settings["ended"].tell.remote(code))
    if code and code not in LASTING:
        raise RuntimeError(f"jaxtrain ended with exit code {code}")


def trainer(arguments: argparse.Namespace, words: Sequence[str], ended: Any) -> Any:
    """Makes the JaxTrainer.

    Args:
        arguments: Of this script.
        words: Of `jaxtrain train`.
        ended: The actor that is told exit codes.
    """
    import ray.train  # pyright: ignore[reportMissingImports]
    from ray.train.v2.jax import JaxTrainer  # pyright: ignore[reportMissingImports]
    from ray.train.v2.jax.config import JaxConfig  # pyright: ignore[reportMissingImports]

    resources = {"CPU": arguments.cpus}
    if arguments.gpus:
        resources["GPU"] = arguments.gpus
        jax_config, platforms = JaxConfig(use_gpu=True), "cuda,cpu"
    else:
        # Ray joins the workers of TPUs and GPUs only, by the platform that the environment names.
        jax_config, platforms = JaxConfig(use_tpu=True), "cpu"
        words = [*words, "--emulate", str(arguments.emulate)]
    return JaxTrainer(
        train_in_worker,
        train_loop_config={"words": ["train", *words], "ended": ended},
        jax_config=jax_config,
        scaling_config=ray.train.ScalingConfig(
            num_workers=arguments.workers,
            use_gpu=bool(arguments.gpus),
            resources_per_worker=resources,
            placement_strategy="SPREAD",
        ),
        run_config=ray.train.RunConfig(
            name=arguments.name,
            storage_path=os.path.abspath(arguments.results),
            worker_runtime_env={"env_vars": {"JAX_PLATFORMS": platforms}},
            failure_config=ray.train.FailureConfig(max_failures=arguments.restarts),
        ),
    )


def read_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Returns the arguments of this script and, checked, the words after `--`.

    Raises:
        UserError: The config is wrong.
    """
    parser = argparse.ArgumentParser(usage="%(prog)s --workers N [options] -- CONFIG [key=value ...] --run-dir DIR")
    parser.add_argument("--workers", type=int, required=True, help="processes, one per host")
    devices = parser.add_mutually_exclusive_group()
    devices.add_argument("--gpus", type=int, help="GPUs per worker")
    devices.add_argument("--emulate", type=int, default=1, help="without GPUs: CPU devices per worker; default: 1")
    parser.add_argument("--cpus", type=int, default=1, help="CPUs per worker that Ray sets aside; default: 1")
    parser.add_argument("--restarts", type=int, default=3, help="starts after a failure; default: 3")
    parser.add_argument("--results", required=True, help="folder of what Ray writes, shared by all workers")
    parser.add_argument("--name", default="jaxtrain", help="name of the run in Ray; default: jaxtrain")
    parser.add_argument("--address", help="address of a Ray cluster; default: RAY_ADDRESS, or one on this machine")
    here, words = sys.argv[1:], []
    if "--" in here:
        here, words = here[: here.index("--")], here[here.index("--") + 1 :]
    arguments = parser.parse_args(here)
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--run-dir=") else [word])]
    if "--run-dir" not in words[:-1]:
        parser.error("after '--' stand CONFIG, key=value settings and --run-dir DIR, as for jaxtrain train")
    from jaxtrain.config import load_config
    from jaxtrain.config.files import shipped_configs

    load_config(words[0], overrides=[word for word in words[1:] if "=" in word and not word.startswith("-")])
    place = words.index("--run-dir") + 1
    # Workers have a working directory of their own.
    words[place] = os.path.abspath(words[place])
    if words[0] not in shipped_configs():
        words[0] = os.path.abspath(words[0])
    return arguments, words


def main() -> int:
    """Trains; returns the exit code of jaxtrain, and 1 where Ray gave up."""
    from jaxtrain.errors import UserError

    try:
        arguments, words = read_arguments()
    except UserError as error:
        print(f"ray_train: {error}", file=sys.stderr)
        return error.exit_code
    # Ray reads these when it is imported: it sends statistics of its use otherwise.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    import ray  # pyright: ignore[reportMissingImports]

    class Ended:
        """Keeps the exit code of the run: the function of a worker cannot return one to this process."""

        def __init__(self) -> None:
            self.code = 0

        def tell(self, code: int) -> None:
            self.code = code

        def ask(self) -> int:
            return self.code

    if arguments.address is None and "RAY_ADDRESS" not in os.environ:
        # A cluster of this machine alone: whoever reaches it may run programs. Ray takes 127.0.0.1 for "choose one".
        ray.init(include_dashboard=False, _node_ip_address="127.0.0.2")
    else:
        ray.init(address=arguments.address)
    try:
        ended = ray.remote(num_cpus=0)(Ended).remote()
        trainer(arguments, words, ended).fit()
        return ray.get(ended.ask.remote())
    except ray.train.TrainingFailedError as error:
        print(f"ray_train: {str(error).splitlines()[0]}; the same command continues the run", file=sys.stderr)
        return 1
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
