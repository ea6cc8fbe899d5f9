"""How commands that do not train check a config that `jaxtrain train` would refuse."""

from jaxtrain.config import Loaded
from jaxtrain.config.kinds import check_kinds
from jaxtrain.runtime.terminal import print_remark


def check_or_remark(loaded: Loaded) -> None:
    """Print the notes of the loader, and check that the kinds of model, data and task fit together.

    A transformer with causal=false is only remarked upon, because a task from Python, which no config describes, can
    train it.

    Raises:
        ConfigError: the kinds do not fit together.
    """
    for note in loaded.notes:
        print_remark(note)
    model = loaded.config.model
    own = model.kind == "transformer" and not model.causal and loaded.config.task == "language_modeling"
    if own:
        print_remark("model.causal=false takes a task of your own (task.call, or Python); 'jaxtrain train' refuses it")
    check_kinds(loaded.config, own_task=own)
