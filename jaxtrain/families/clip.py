"""CLIP: an encoder of images and one of texts (Radford et al. 2021, arXiv 2103.00020, table 20). No jax here."""

from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import ConfigError
from jaxtrain.families.family import Family, fixed, ignored, mapped, own, read_architecture
from jaxtrain.formats import rows
from jaxtrain.formats.rows import Entry, Row, copy, dims, linear, normed

_ACTIVATIONS = {"quick_gelu": "quick_gelu", "gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}
_PARTS = {"attention_norm": "layer_norm1", "mlp_norm": "layer_norm2", "mlp/up": "mlp.fc1", "mlp/down": "mlp.fc2"}
_PARTS |= {f"attention/{name}": f"self_attn.{name[0]}_proj" for name in ("query", "key", "value")}
_PARTS |= {"attention/output": "self_attn.out_proj"}
_SHARED = ("activation", "norm_epsilon", "end_token")
_LARGEST = 2  # the end in files older than the key: the largest id of a text


def _tower(name: str, architecture: str, width: int, heads: int, **more: tuple[str, int]) -> Family:
    """One encoder's part of config.json; `more` are its own keys, each with our name and the default."""
    sizes = dict(hidden_size=("embed_dim", width), intermediate_size=("mlp_dim", 4 * width)) | more
    sizes |= dict(num_hidden_layers=("num_layers", 12), num_attention_heads=("num_heads", heads))
    keys = [mapped(theirs, ours, default) for theirs, (ours, default) in sizes.items()]
    keys += [mapped("hidden_act", "activation", "quick_gelu", _ACTIVATIONS)]
    keys += [mapped("layer_norm_eps", "norm_epsilon", 1e-5), fixed("attention_dropout", 0.0, 0)]
    keys += ignored("dropout", "projection_dim")
    return Family(name=name, architecture=architecture, keys=tuple(keys), tensors=lambda _: ())


_TEXT = dict(vocab_size=("vocab_size", 49408), max_position_embeddings=("max_sequence_length", 77))
_TEXT |= dict(eos_token_id=("end_token", 49407))
_IMAGE = dict(image_size=("image_size", 224), patch_size=("patch_size", 32), num_channels=("channels", 3))
_TOWERS = {
    ("text", "text_config"): _tower("clip_text_model", "CLIPTextModel", 512, 8, **_TEXT),
    ("image", "vision_config"): _tower("clip_vision_model", "CLIPVisionModel", 768, 12, **_IMAGE),
}


def _read(_: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    read_architecture(file, "CLIPModel")
    found: dict[str, Any] = {}
    for (side, name), family in _TOWERS.items():
        # Some files have both, of which the second one counts.
        said = file[name] if file[f"{name}_dict"] is None else file[f"{name}_dict"]
        tower = family.from_published(said or {})
        for key in [key for key in _SHARED if key in tower]:
            if found.setdefault(key, tower[key]) != tower.pop(key):
                raise ConfigError(f"config.json has another {key} in {name} than in text_config; ours is of both")
        found[side] = {key: value for key, value in tower.items() if key != "kind"}
    if type(found["end_token"]) is not int:
        raise ConfigError(
            f"config.json has eos_token_id: {found['end_token']}, which is not supported; it knows one id"
        )
    return found | ({"end_token": None} if found["end_token"] == _LARGEST else {})


def _write(model: Mapping[str, Any]) -> dict[str, Any]:
    end = _LARGEST if model["end_token"] is None else model["end_token"]
    shared = {key: model[key] for key in _SHARED} | {"end_token": end}
    return {name: family.to_published({**model[side], **shared}) for (side, name), family in _TOWERS.items()}


def _common(tower: Mapping[str, Any], side: str, theirs: str, positions: int, head: str, width: int) -> list[Row]:
    """The rows that both encoders have."""
    D, H, L = dims(tower, "DHL")
    group = {**tower, "num_kv_heads": H, "head_dim": D // H, "bias": True, "norm": "layernorm"}
    blocks = rows.block_rows(group, _PARTS, prefix=f"{side}/blocks/", beside=True)
    return [
        Entry(f"{side}/positions", f"{theirs}.embeddings.position_embedding.weight", copy(positions, D)),
        *rows.in_layers(blocks, f"{theirs}.encoder.layers.{{layer}}.", L),
        Entry(f"{side}/head/output/kernel", f"{head}_projection.weight", linear((D,), (width,))),
        rows.Skipped(rf"{theirs}\.embeddings\.position_ids"),
    ]


def _tensors(model: Mapping[str, Any]) -> tuple[Row, ...]:
    text, image, X = model["text"], model["image"], int(model["projection_dim"])
    (D, V, P), E, (C, S) = dims(text, "DVP"), image["embed_dim"], (image["channels"], image["patch_size"])
    return (
        Entry("logit_scale", "logit_scale", copy()),
        Entry("text/embedding", "text_model.embeddings.token_embedding.weight", copy(V, D)),
        *_common(text, "text", "text_model", P, "text", X),
        *normed("text/output_norm", "text_model.final_layer_norm", D),
        Entry("image/class_token", "vision_model.embeddings.class_embedding", copy(E)),
        Entry("image/patches/kernel", "vision_model.embeddings.patch_embedding.weight", rows.patches(E, C, S)),
        *normed("image/embedding_norm", "vision_model.pre_layrnorm", E),
        *_common(image, "image", "vision_model", 1 + (image["image_size"] // S) ** 2, "visual", X),
        *normed("image/output_norm", "vision_model.post_layernorm", E),
    )


def _size(width: int, patch: int, layers: int, image_width: int, side: int = 224) -> dict[str, Any]:
    text = dict(num_layers=12, embed_dim=width, num_heads=width // 64)
    image = dict(num_layers=layers, embed_dim=image_width, num_heads=image_width // 64)
    image |= dict(patch_size=patch, image_size=side)
    return dict(kind="clip", projection_dim=width, end_token=49407, text=text, image=image)


_NAMES = ("architectures", *(name + end for _, name in _TOWERS for end in ("", "_dict")))
FAMILY = Family(
    name="clip",
    architecture="CLIPModel",
    keys=(mapped("projection_dim", "projection_dim", 512), *map(own, _NAMES), *ignored("logit_scale_init_value")),
    tensors=_tensors,
    fixed=dict(kind="clip"),
    read=_read,
    write=_write,
    sizes={
        "clip_vit_b32": _size(512, 32, 12, 768),
        "clip_vit_b16": _size(512, 16, 12, 768),
        "clip_vit_l14": _size(768, 14, 24, 1024),
        "clip_vit_l14_336": _size(768, 14, 24, 1024, side=336),
    },
)
