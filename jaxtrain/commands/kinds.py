"""What commands that do not train say of a config that `jaxtrain train` would refuse."""

from jaxtrain.config import Loaded
from jaxtrain.config.kinds import check_kinds
from jaxtrain.runtime.remarks import print_remark


def check_or_remark(loaded: Loaded) -> None:
    """Print the loader's notes; raise where parts of the config cannot go together.

    A model that sees ahead is remarked upon only: a task from Python, which no config describes, trains it.

    Raises:
        ConfigError: from `check_kinds`.
    """
    for note in loaded.notes:
        print_remark(note)
    model = loaded.config.model
    own = model.kind == "transformer" and not model.causal
    if own:
        print_remark("model.causal=false takes a task of your own (Python); 'jaxtrain train' refuses it")
    check_kinds(loaded.config, own_task=own)
