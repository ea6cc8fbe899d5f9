"""Several models as one: pairs of encoders, teacher and student, generator and discriminator."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import jax

from jaxtrain.config.arguments import shown
from jaxtrain.errors import ConfigError
from jaxtrain.layout.rules import FamilyTable
from jaxtrain.layout.sharding import current_layout, layout_of_part, use_layout
from jaxtrain.models.model import DrawsByRow, Model, ModelState, Params, key_for, parameter_shapes


def from_models(models: Mapping[str, Model], *, name: str | None = None) -> Model:
    """Make one model of several, whose parameters are theirs under their names.

    Inputs and outputs are dicts by these names; a model without inputs is not called. Each keeps its own axes table,
    remat and model_state, and its random numbers do not depend on the others. The whole runs with parallel.pipe=1.

    Args:
        models: name -> model; a name holds no "/".
        name: for people; None: the names joined by "+".

    Returns:
        A model: `apply({"student": x})` inside a loss gives `{"student": outputs}`.

    Raises:
        ConfigError: something that is no model, a model that is adapted, or a name that cannot be a part of a path.

    Example:
        >>> pair = jt.from_models({"student": model, "teacher": text_model})
        >>> sorted(pair.init(jax.random.key(0))[0])
        ['student', 'teacher']
    """
    if not isinstance(models, Mapping) or not models:
        raise ConfigError(
            f"from_models takes a dict of models by name, not {shown(models)}; write "
            "from_models({'student': small, 'teacher': large})"
        )
    for part, model in models.items():
        if not isinstance(part, str) or not part or "/" in part or "*" in part:
            raise ConfigError(f"from_models: {part!r} cannot be the name of a model; use a word such as 'student'")
        if not isinstance(model, Model):
            raise ConfigError(
                f"from_models: {part!r} is {shown(model)}, not a jaxtrain.Model; write jaxtrain.from_nnx, from_linen, "
                "from_functions or build_model"
            )
        if model.adapted is not None:
            raise ConfigError(
                f"from_models: the model {part!r} is adapted already, and the whole would train its base; adapt the "
                f"whole: jt.adapt(from_models(...), lora=jt.LoraConfig(targets=('{part}/*',)))"
            )
    models = dict(models)

    def init(key: jax.Array) -> tuple[Params, ModelState]:
        made = {part: model.init(jax.random.fold_in(key, i)) for i, (part, model) in enumerate(models.items())}
        params = {part: params for part, (params, _) in made.items()}
        return params, {part: state for part, (_, state) in made.items() if jax.tree.leaves(state)}

    def apply(
        params: Params, model_state: ModelState, inputs: Any, *, key: jax.Array | None, train: bool
    ) -> tuple[dict[str, Any], ModelState]:
        _check_inputs(inputs, models)
        outputs, states = {}, dict(model_state)
        layout = current_layout()
        for i, (part, model) in enumerate(models.items()):
            if part not in inputs:
                continue
            part_key = None if key is None else key_for(model.apply, jax.random.fold_in(key, i))
            with use_layout(None if layout is None else layout_of_part(layout, part, model.axes)):
                outputs[part], state = model.apply(
                    params[part], model_state.get(part, {}), inputs[part], key=part_key, train=train
                )
            if part in states:
                states[part] = state
        return outputs, states

    return Model(
        name or "+".join(models),
        init,
        DrawsByRow(apply),  # each part gets the key that it asks for
        {f"{part}/{row}": axes for part, model in models.items() for row, axes in _rows(model).items()},
        gathers_itself=tuple(f"{part}/{tree}" for part, model in models.items() for tree in model.gathers_itself),
        has_experts=any(model.has_experts for model in models.values()),
        linears={f"{part}/{path}": dims for part, model in models.items() for path, dims in model.linears.items()},
    )


def _rows(model: Model) -> Mapping[str, tuple[str | None, ...]]:
    """The rows of a model's axes table that match a parameter: the table of a family has rows for its variants too."""
    if not isinstance(model.axes, FamilyTable):
        return model.axes
    paths = list(parameter_shapes(model))
    return {row: axes for row, axes in model.axes.items() if any(fnmatchcase(path, row) for path in paths)}


def _check_inputs(inputs: Any, models: Mapping[str, Model]) -> None:
    named = ", ".join(map(repr, models))
    if not isinstance(inputs, Mapping) or not inputs:
        raise ConfigError(
            f"the inputs are {shown(inputs)}, but the model of {named} takes a dict by these names; write "
            f"{{{next(iter(models))!r}: inputs}}"
        )
    unknown = [part for part in inputs if part not in models]
    if unknown:
        raise ConfigError(f"the inputs name {unknown[0]!r}, but the model consists of {named}; use these names")
