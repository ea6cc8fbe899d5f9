"""`jaxtrain bench`: measures the limits of a device, and how much of them the step of a config reaches."""

import argparse
from pathlib import Path

from jaxtrain.bench.measure import PARTS, measure
from jaxtrain.commands.shared import json_text, load_described, print_facts, write_output, writes
from jaxtrain.errors import ConfigError
from jaxtrain.metrics.progress import Progress


def run(arguments: argparse.Namespace) -> int:
    """Measure a config and print the results; write JSON if it is asked for; return 0.

    Raises:
        ConfigError: the config cannot run, a part does not exist, or a file cannot be written.
    """
    skip = [part for parts in arguments.skip for part in parts.split(",")]
    for part in skip:
        if part not in PARTS:
            raise ConfigError(f"--skip {part}: no such part; there are {', '.join(PARTS)}")
    loaded = load_described(arguments)
    if loaded.config.parallel.auto:
        raise ConfigError("parallel.auto: a bench measures one layout; set the degrees, or leave parallel out")
    if arguments.json is not None:
        with writes("--json"):
            Path(arguments.json).touch()  # before the measurements, which take minutes
    with Progress() as progress:
        answer = measure(
            loaded,
            arguments.config,
            arguments.overrides,
            emulate=arguments.emulate,
            skip=skip,
            phase=progress.phase,
            step_budget_seconds=arguments.seconds,
        )
    print_facts(answer)
    if arguments.json is not None:
        write_output("--json", arguments.json, f"{json_text(answer)}\n")
    return 0
