"""`load_pretrained` and `save_pretrained`: published models from Python."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config.base import Group
from jaxtrain.config.published import settings_of
from jaxtrain.formats.hub import published_place
from jaxtrain.layout.sharding import path_name
from jaxtrain.models.model import Model, ModelState, Params
from jaxtrain.models.sharded import ShardedModel
from jaxtrain.models.shipped.build import build_model
from jaxtrain.weights.read import Places, PublishedModel, by_path, find_places, open_published, read_places
from jaxtrain.weights.write import Form, Origin, saved_dtypes, write_published


@dataclass(frozen=True)
class Pretrained:
    """A published model, opened by `load_pretrained`; its weights are read when they are first used.

    Attributes:
        path: The folder or file.
        config: The model group of our config, with the values of its config.json.
        model: The model.
        published: Its tensors, its family and its config.json.
        places: Where each parameter lies in it.

    Example:
        >>> params, _ = text_model.init(jax.random.key(0))
        >>> group = {**small, "vocab_size": 256}
        >>> pretrained = jt.load_pretrained(jt.save_pretrained("tiny", params, model=group))
        >>> sharded = jt.shard_model(pretrained.model)
        >>> params, model_state = pretrained.read(sharded)  # in its shardings; pretrained.params is on one device
        >>> pretrained.config.num_heads
        2
    """

    path: Path
    config: Group
    model: Model
    published: PublishedModel
    places: Places

    def __repr__(self) -> str:
        return f"Pretrained {str(self.path)!r}: family {self.published.family.name}, model {self.model.name}"

    @cached_property
    def _read_here(self) -> tuple[Params, ModelState]:
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        drawn = jax.eval_shape(self.model.init, jax.eval_shape(lambda: jax.random.key(0)))
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), drawn)
        return self._read(*like)

    @property
    def params(self) -> Params:
        """The parameters on the first device, in the dtypes of `model.init`."""
        return self._read_here[0]

    @property
    def model_state(self) -> ModelState:
        """What changes without a gradient (batch statistics), on the first device."""
        return self._read_here[1]

    def read(self, sharded_model: ShardedModel) -> tuple[Params, ModelState]:
        """Parameters and model_state in the shardings and dtypes of a sharded model.

        Each process reads only what its devices hold.

        Args:
            sharded_model: Made of `model` by `shard_model`.

        Raises:
            ConfigError: It is of another model.
        """
        return self._read(sharded_model.abstract_params, sharded_model.abstract_model_state)

    def _read(self, params: Any, model_state: Any) -> tuple[Params, ModelState]:
        def filled(tree: Any, places: Mapping[str, Any]) -> Any:
            found = read_places(self.published, places, by_path(tree))
            return jax.tree_util.tree_map_with_path(lambda path, leaf: found[path_name(path)], tree)

        return filled(params, self.places.params), filled(model_state, self.places.model_state)


def load_pretrained(path: str | Path, *, model: Mapping[str, Any] | None = None) -> Pretrained:
    """Open a published model: a folder with config.json and safetensors, a GGUF file, or one on the Hugging Face hub.

    Headers are read and checked here; the weights are read when they are first used.

    Args:
        path: The folder or file; or OWNER/NAME[@REVISION] on the hub, which its own client fetches and caches.
        model: Keys of our model group that are to differ from what its config.json says ({"dropout": 0.1}).

    Raises:
        ConfigError: There is no such model; its family, or a key or a value of its config.json, is not supported.
        CheckpointError: Its files are missing or damaged, or hold other tensors than its config.json says.

    Example:
        >>> params, _ = text_model.init(jax.random.key(0))
        >>> group = {**small, "vocab_size": 256}
        >>> folder = jt.save_pretrained("tiny", params, model=group)  # or a folder from elsewhere
        >>> pretrained = jt.load_pretrained(folder, model={"dropout": 0.1})
        >>> pretrained
        Pretrained 'tiny': family llama, model transformer
        >>> pretrained.params["embedding"].shape
        (256, 16)
    """
    from jaxtrain.config.load import load_config

    path = Path(published_place(path, what="load_pretrained"))
    published = open_published(path)
    config = load_config({"model": {"from": str(path), **(model or {})}}).config.model
    settings = settings_of(config)
    places = find_places(published, settings)
    return Pretrained(Path(path), config, built_of(config, settings), published, places)


def save_pretrained(
    folder: str | Path,
    params: Params,
    *,
    model: "Pretrained | Group | Mapping[str, Any]",
    model_state: ModelState | None = None,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
) -> Path:
    """Write parameters as a published folder, which other tools open.

    Args:
        folder: The folder to make; it may exist if it is empty.
        params: The parameters, sharded in any way; every process passes its own.
        model: What they are parameters of: what `load_pretrained` gave, or a model group of our config with its
            vocab_size.
        model_state: Batch statistics and the like, where the model has them.
        dtype: float32, float16 or bfloat16; None: that of the published model, else float32.
        max_shard_size: Most bytes per file, as in "5GB" or "500MB".

    Returns:
        The folder.

    Raises:
        ConfigError: The folder is not empty, no published family has this model, or an argument is out of range.

    Example:
        >>> params, _ = text_model.init(jax.random.key(0))
        >>> group = {**small, "vocab_size": 256}
        >>> folder = jt.save_pretrained("mine", params, model=group, dtype="bfloat16")
        >>> sorted(file.name for file in folder.iterdir())
        ['config.json', 'model.safetensors']
    """
    opened = model if isinstance(model, Pretrained) else None
    group = model_group(model)
    settings = settings_of(group)
    origin = None
    if opened is not None:
        origin = Origin(opened.published.source.config, opened.published.source.files, saved_dtypes(opened.published))
    form = Form(dtype, max_shard_size)
    return write_published(folder, settings, params, model_state or {}, origin=origin, form=form)


def model_group(model: "Pretrained | Group | Mapping[str, Any]") -> Group:
    """Returns the model group of what `load_pretrained` gave, of itself, or of its keys."""
    if isinstance(model, Pretrained):
        return model.config
    if isinstance(model, Group):
        return model
    from jaxtrain.config.load import load_config

    return load_config({"model": model}).config.model


def built_of(group: Any, settings: Mapping[str, Any]) -> Model:
    """Build the model of a model group; `settings` are its keys, with its sizes."""
    size = settings.get("image_size", 224)
    pixels = (size, size, settings.get("channels", 3))
    return build_model(
        group, input_shape=(settings["max_sequence_length"],) if "max_sequence_length" in settings else pixels
    )
