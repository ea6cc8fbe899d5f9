"""`jaxtrain config`: the shipped configs, and of one config its keys, its YAML, its schema or its shardings."""

import argparse
import json
import math
from typing import Any

from jaxtrain.commands.shared import own_code, print_table, print_text
from jaxtrain.config import Config, Loaded, load_config
from jaxtrain.config.files import find_config, shipped_configs, to_yaml
from jaxtrain.config.kinds import check_kinds
from jaxtrain.config.load import DescribedKey, describe, nearest_key
from jaxtrain.errors import ConfigError
from jaxtrain.runtime.terminal import print_remark


def run(arguments: argparse.Namespace) -> int:
    """Print the shipped configs, a schema, or a config in one of its forms; 0."""
    config, only = arguments.config, arguments.only
    if arguments.json_schema:
        print_text(json.dumps(Config.model_json_schema(), indent=2, ensure_ascii=False))
    elif config is None:
        first_lines = {
            name: find_config(name).read_text(encoding="utf-8").partition("\n")[0] for name in shipped_configs()
        }
        print_table(("name", "description"), [(name, line.lstrip("# ")) for name, line in first_lines.items()])
    else:
        loaded = _load(config, arguments)
        if arguments.yaml:
            print_text(to_yaml(loaded.config.model_dump(mode="json")).rstrip("\n"))
        elif arguments.sharding:
            with own_code(loaded.config):
                _print_shardings(loaded.config, emulate=arguments.emulate)
        else:
            rows = [(key.path, key.value, key.type, key.default, key.origin, key.doc) for key in _keys(loaded, only)]
            print_table(("key", "value", "type", "default", "origin", "doc"), rows)
            try:
                check_kinds(loaded.config)
            except ConfigError as error:
                # A remark and no error, because users look up the keys of another kind here, one change at a time.
                print_remark(f"jaxtrain train would refuse this: {error}")
    return 0


def _load(config: str, arguments: argparse.Namespace) -> Loaded:
    try:
        loaded = load_config(config, overrides=arguments.overrides)
    except ConfigError as error:
        # What is written to be read again takes the tokenizer of the weights; people look up keys without them.
        if arguments.yaml:
            raise
        loaded = load_config(config, overrides=arguments.overrides, weights=False)
        print_remark(f"jaxtrain train would refuse this: {error}")
    for part, name in loaded.from_python.items():
        print_remark(f"the {part} of {config} came from Python ({name}); this config does not describe it")
    for note in loaded.notes:
        print_remark(note)
    return loaded


def _keys(loaded: Loaded, only: str | None) -> list[DescribedKey]:
    """The keys of a config, or those below a prefix."""
    keys = describe(loaded)
    if only is not None:
        keys = [key for key in keys if f"{key.path}.".startswith(f"{only.rstrip('.')}.")]
        if not keys:
            close = nearest_key(only, loaded.config)
            raise ConfigError(f"--only {only}: no key starts with it" + (f"; did you mean {close!r}?" if close else ""))
    return keys


def _print_shardings(config: Config, *, emulate: int | None) -> None:
    """Print path, shape, logical axes and mesh axes of each parameter, from shapes alone."""
    from jaxtrain.runtime import distributed

    distributed.start(emulate=emulate, compilation_cache=None)
    import jax

    from jaxtrain.data.configured import open_run_data
    from jaxtrain.layout.rules import table_row
    from jaxtrain.layout.sharding import path_name
    from jaxtrain.metrics.format import format_bytes, format_count
    from jaxtrain.train.build import build_step

    model, sizes = config.model, {}
    if model.kind == "transformer" and model.vocab_size is not None:
        sizes["input_shape"] = (model.max_sequence_length,)
    else:
        data = open_run_data(config)
        sizes |= {"input_shape": data.input_shape, "vocab_size": data.vocab_size, "num_outputs": data.num_outputs}
    sharded_model = build_step(config, **sizes).sharded_model
    rows, held, total = [], 0, 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(sharded_model.abstract_params):
        name = path_name(path)
        each = leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        held, total = held + each, total + leaf.size
        axes = table_row(name, sharded_model.model.axes)
        logical = "(not in the table)" if axes is None else ", ".join(axis or "-" for axis in axes)
        shape = " x ".join(map(str, leaf.shape)) or "scalar"
        rows.append((name, shape, logical, _mesh_axes(leaf.sharding.spec), format_bytes(each)))
    print_table(("parameter", "shape", "logical axes", "mesh axes", "per device"), rows)
    mesh = " ".join(f"{axis}={size}" for axis, size in sharded_model.mesh.shape.items() if size > 1) or "one device"
    print_text(f"\n{format_count(total)} parameters ({total:,}) on {mesh}: {format_bytes(held)} per device")


def _mesh_axes(spec: Any) -> str:
    entries = ["+".join((entry,) if isinstance(entry, str) else entry) if entry else "-" for entry in spec]
    return ", ".join(entries) if any(entry != "-" for entry in entries) else "whole"
