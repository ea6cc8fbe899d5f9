"""`jaxtrain data prepare`: encodes text into files of tokens (token shards)."""

from collections.abc import Sequence

from jaxtrain.commands.data_progress import prepare_progress
from jaxtrain.commands.output import print_text
from jaxtrain.config import load_config
from jaxtrain.config.data import DocumentsData, JsonlData, TextData
from jaxtrain.config.local_path import local_path
from jaxtrain.config.yaml_file import to_yaml
from jaxtrain.errors import ConfigError
from jaxtrain.runtime.terminal import print_remark


def run_data_prepare(
    config: str, overrides: Sequence[str], *, output: str, tokens_per_shard: int, workers: int | None
) -> int:
    """Encode the text of a config, and print how to train on the result.

    Args:
        config: a shipped name or a path.
        overrides: `key=value` settings that replace those of the config.
        output: folder for the token shards, which is created.
        tokens_per_shard: tokens in each file except the last.
        workers: processes that encode; None: as many as there are cores, where there is enough text.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: the data of the config is not text.
    """
    loaded = load_config(config, overrides=overrides)
    loaded.check_described(given=["model", "task"])
    source = loaded.config.data
    if not isinstance(source, TextData | JsonlData | DocumentsData):
        raise ConfigError(
            f"data.kind={source.kind}: only text and jsonl are encoded, and documents of other formats; set "
            "data.kind=text data.path=FILE"
        )
    for note in loaded.notes:
        print_remark(note)
    from jaxtrain.data import prepare_tokens

    folder = local_path(output, what="--output")
    with prepare_progress() as progress:
        made = prepare_tokens(source, folder, tokens_per_shard=tokens_per_shard, workers=workers, progress=progress)
    print_remark(
        f"{_counted(made['num_documents'], 'document')}, {made['num_tokens']:,} tokens of {made['vocab_size']:,} ids "
        f"({made['dtype']}) in {_counted(len(made['shards']), 'file')} in {made['output']}"
    )
    print_remark(f"train on them: jaxtrain train {config} data.kind=tokens data.path={made['output']}")
    # On standard output, so that it can be appended to a config file.
    print_text(to_yaml({"data": {"kind": "tokens", "path": made["output"]}}).rstrip("\n"))
    return 0


def _counted(count: int, noun: str) -> str:
    return f"one {noun}" if count == 1 else f"{count:,} {noun}s"
