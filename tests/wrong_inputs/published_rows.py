"""Wrong inputs of what reads and writes published models: (call, what was given, how to write it)."""

from pathlib import Path

import jax.numpy as jnp

import jaxtrain as jt

LLAMA = Path(__file__).parent.parent / "interop" / "published" / "llama"
ADAPTER = Path(__file__).parent.parent / "interop" / "adapters" / "llama"
GROUP = {"kind": "transformer", "num_layers": 1, "embed_dim": 8, "num_heads": 2, "vocab_size": 40}


def saved(**more):
    return jt.save_pretrained("out", {}, **{"model": GROUP, **more})


def saved_norm(scale):
    return jt.save_pretrained("out", {"blocks": {"attention_norm": {"scale": scale}}}, model=GROUP)


def adapter(**more):
    return jt.save_adapter("out", {}, **{"model": adapted(), "base": GROUP, **more})


def adapted():
    return jt.adapt(plain(), lora=jt.LoraConfig(rank=2))


def plain():
    return jt.build_model(GROUP, input_shape=(4,))


ROWS = {
    "load_adapter: a number": (
        lambda: jt.load_adapter(3, base=LLAMA),
        "not 3",
        "load_adapter('adapters/mine', base='models/llama')",
    ),
    "load_adapter: base": (
        lambda: jt.load_adapter(ADAPTER, base=3),
        "not 3",
        "load_adapter('adapters/mine', base='models/llama')",
    ),
    "load_adapter: a published folder": (
        lambda: jt.load_adapter(LLAMA, base=LLAMA),
        "has no adapter_config.json",
        "the folder of an adapter",
    ),
    "save_adapter: a number": (
        lambda: jt.save_adapter(3, {}, model=adapted(), base=GROUP),
        "not 3",
        "save_adapter('adapters/mine', params, model=adapted, base=pretrained)",
    ),
    "save_adapter: model": (
        lambda: adapter(model=3),
        "not 3",
        "save_adapter('adapters/mine', params, model=adapted, base=pretrained)",
    ),
    "save_adapter: no adapters": (lambda: adapter(model=plain()), "has no adapters", "save_pretrained"),
    "save_adapter: base": (lambda: adapter(base=3), "not 3", "base=pretrained"),
    "save_adapter: a full folder": (
        lambda: jt.save_adapter(LLAMA, {}, model=adapted(), base=GROUP),
        "not empty",
        "name a new folder",
    ),
    "save_adapter: params": (
        lambda: adapter(),
        "params hold no adapter at blocks/",
        "save_adapter(folder, state.params",
    ),
    "Pretrained.read: no model": (
        lambda: jt.load_pretrained(LLAMA).read(3),
        "not 3",
        "pretrained.read(jt.shard_model(pretrained.model))",
    ),
    "load_pretrained: a number": (lambda: jt.load_pretrained(3), "not 3", "load_pretrained('models/llama')"),
    "load_pretrained: no folder": (lambda: jt.load_pretrained("none"), "no folder none", "config.json"),
    "save_pretrained: no vocabulary": (
        lambda: saved(model={key: value for key, value in GROUP.items() if key != "vocab_size"}),
        "vocab_size is null",
        "write the number of rows",
    ),
    "load_pretrained: keys": (lambda: jt.load_pretrained(LLAMA, model=3), "not 3", "model={'dropout': 0.1}"),
    "load_pretrained: a wrong key": (
        lambda: jt.load_pretrained(LLAMA, model={"drop": 1}),
        "model.drop",
        "model.dropout",
    ),
    "load_pretrained: another kind": (
        lambda: jt.load_pretrained(LLAMA, model={"kind": "mlp"}),
        "model.kind=mlp",
        "leave out one of the two",
    ),
    "load_pretrained: another norm": (
        lambda: jt.load_pretrained(LLAMA, model={"norm": "layernorm"}),
        "model.norm=layernorm",
        "leave model.norm out",
    ),
    "save_pretrained: a number": (
        lambda: jt.save_pretrained(3, {}, model=GROUP),
        "not 3",
        "save_pretrained('models/mine', params, model=pretrained)",
    ),
    "save_pretrained: a full folder": (
        lambda: jt.save_pretrained(LLAMA, {}, model=GROUP),
        "not empty",
        "name a new folder",
    ),
    "save_pretrained: base": (lambda: saved(base="fp4"), "not 'fp4'", "base='nf4'"),
    "save_pretrained: model": (lambda: saved(model=3), "not 3", "model=pretrained"),
    "save_pretrained: params": (lambda: saved(), "lacks blocks/", "params"),
    "save_pretrained: another shape": (
        lambda: saved_norm(jnp.ones((2, 9))),
        "blocks/attention_norm/scale [2, 9]",
        "[1, 8]",
    ),
    "save_pretrained: dtype": (lambda: saved(dtype="int8"), "'int8'", "bfloat16"),
    "save_pretrained: size": (lambda: saved(max_shard_size="many"), "'many'", "5GB"),
    "save_pretrained: no family": (lambda: saved(model={**GROUP, "norm": "layernorm"}), "model.norm", "family"),
    "save_pretrained: an MLP": (lambda: saved(model={"kind": "mlp"}), "model.kind=mlp", "family"),
}
