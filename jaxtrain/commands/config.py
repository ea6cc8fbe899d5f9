"""`jaxtrain config`: the shipped configs, and of one config its keys, its YAML, its schema or its shardings."""

import argparse
import json
import math

from jaxtrain.commands.shared import load_noted, print_records, print_table, print_text
from jaxtrain.config import Config, Loaded
from jaxtrain.config.files import find_config, shipped_configs, to_yaml
from jaxtrain.config.kinds import check_kinds
from jaxtrain.config.load import describe, nearest_key
from jaxtrain.errors import ConfigError
from jaxtrain.runtime.terminal import print_remark


def run(arguments: argparse.Namespace) -> int:
    """Print the shipped configs, a schema, or a config in one of its forms; return 0."""
    if arguments.json_schema:
        print_text(json.dumps(Config.model_json_schema(), indent=2, ensure_ascii=False))
        return 0
    if arguments.config is None:
        _print_shipped()
        return 0
    loaded = _load(arguments)
    if arguments.yaml:
        print_text(to_yaml(loaded.config.model_dump(mode="json")), end="")
    elif arguments.sharding:
        _print_shardings(loaded.config, emulate=arguments.emulate)
    else:
        _print_keys(loaded, arguments.only)
    return 0


def _load(arguments: argparse.Namespace) -> Loaded:
    try:
        loaded = load_noted(arguments)
    except ConfigError as error:
        # What is written to be read again takes the tokenizer of the weights; people look up keys without them.
        if arguments.yaml:
            raise
        loaded = load_noted(arguments, weights=False)
        print_remark(f"jaxtrain train would refuse this: {error}")
    for part, name in loaded.from_python.items():
        print_remark(f"the {part} came from Python ({name}); this config does not describe it")
    return loaded


def _print_shipped() -> None:
    rows = []
    for name in shipped_configs():
        first_line = find_config(name).read_text(encoding="utf-8").partition("\n")[0]
        rows.append((name, first_line.lstrip("# ")))
    print_table(("name", "description"), rows)


def _print_keys(loaded: Loaded, prefix: str | None) -> None:
    """Print the keys of a config, or those below a prefix."""
    keys = describe(loaded)
    if prefix is not None:
        keys = [key for key in keys if f"{key.path}.".startswith(f"{prefix.rstrip('.')}.")]
    if not keys:
        close = nearest_key(prefix or "", loaded.config)
        hint = f"; did you mean {close!r}?" if close else ""
        raise ConfigError(f"--only {prefix}: no key starts with it{hint}")
    rows = [(key.path, key.value, key.type, key.default, key.origin, key.doc) for key in keys]
    print_table(("key", "value", "type", "default", "origin", "doc"), rows)
    try:
        check_kinds(loaded.config)
    except ConfigError as error:
        # A remark and not an error, because users look up the keys of another kind here, one change at a time.
        print_remark(f"jaxtrain train would refuse this: {error}")


def _print_shardings(config: Config, *, emulate: int | None) -> None:
    """Print path, shape, logical axes and mesh axes of each parameter, from shapes alone."""
    from jaxtrain.runtime import distributed

    distributed.start(emulate=emulate, compilation_cache=None)
    import jax

    from jaxtrain.data.configured import open_run_data
    from jaxtrain.layout.rules import table_row
    from jaxtrain.layout.sharding import path_name
    from jaxtrain.train.build import build_step

    model = config.model
    if model.kind == "transformer" and model.vocab_size is not None:
        step = build_step(config, input_shape=(model.max_sequence_length,))
    else:
        data = open_run_data(config)
        step = build_step(
            config, input_shape=data.input_shape, vocab_size=data.vocab_size, num_outputs=data.num_outputs
        )
    sharded_model = step.sharded_model
    records = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(sharded_model.abstract_params):
        name = path_name(path)
        records.append(
            {
                "parameter": name,
                "shape": leaf.shape,
                "logical axes": table_row(name, sharded_model.model.axes),
                "mesh axes": tuple(leaf.sharding.spec),
                "device_bytes": leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)),
            }
        )
    print_records(records)
    print_text(f"\n{sharded_model.summary}")
