"""`jaxtrain config`: the shipped configs, and of one config its keys, its YAML, its schema or its shardings.

Listing the shipped configs reads the first line of each file; the schema is imported for the rest.
"""

import json
from collections.abc import Sequence

from jaxtrain.commands.output import print_table, print_text
from jaxtrain.config.files import find_config, shipped_configs
from jaxtrain.errors import ConfigError


def print_config(
    config: str | None, overrides: Sequence[str], *, form: str, only: str | None, emulate: int | None
) -> int:
    """Print a config.

    Args:
        config: a shipped name or a path; None: list the shipped configs.
        overrides: `key=value` settings that replace those of the config.
        form: "keys", "yaml", "json-schema" or "sharding".
        only: prefix of the keys or parameters to print; None: all of them.
        emulate: number of CPU devices to emulate for shardings; None: the devices of the machine.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: the config or a key is wrong, or no key begins with `only`, or the form takes none.
    """
    if form == "json-schema":
        if only:
            raise ConfigError("jaxtrain config: --json-schema prints every key; leave out --only")
        from jaxtrain.config.schema import Config

        print_text(json.dumps(Config.model_json_schema(), indent=2, ensure_ascii=False))
    elif config is not None:
        from jaxtrain.commands.config_keys import print_loaded

        print_loaded(config, overrides, form=form, only=only, emulate=emulate)
    elif form != "keys" or only:
        raise ConfigError(f"jaxtrain config: name a config, one of {', '.join(shipped_configs())}")
    else:
        _print_shipped()
    return 0


def _print_shipped() -> None:
    rows = []
    for name in shipped_configs():
        with find_config(name).open(encoding="utf-8") as file:
            first = file.readline().strip()
        rows.append((name, first.removeprefix("#").strip() if first.startswith("#") else ""))
    print_table(("name", "what it is"), rows)
