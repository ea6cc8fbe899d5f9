"""A family as a package of somebody else adds it: Llama's tensors, with scales of its own."""

from jaxtrain.interop.families import llama
from jaxtrain.interop.families.family import Family, decoder_keys, fixed, mapped, own, rope_keys, size


def _read(ours, file):
    scale = file["attention_multiplier"]
    return dict(
        attention_scale=None if scale == ours["head_dim"] ** -0.5 else scale,
        logits_scale=None if file["logits_scaling"] == 1 else 1 / file["logits_scaling"],
    )


def _write(model):
    scale, logits = model["attention_scale"], model["logits_scale"]
    return dict(
        attention_multiplier=model["head_dim"] ** -0.5 if scale is None else scale,
        logits_scaling=1.0 if logits is None else 1 / logits,
    )


FAMILY = Family(
    name="scaled_llama",
    architecture="ScaledLlamaForCausalLM",
    keys=(
        *decoder_keys(size({}, 32, 4096, 32, vocab_size=32000, mlp_dim=11008, max_sequence_length=2048)),
        *rope_keys(10000.0),
        mapped("embedding_multiplier", "embedding_scale", 1.0),
        own("attention_multiplier", 1.0),
        own("logits_scaling", 1.0),
        fixed("attention_bias", False),
        fixed("mlp_bias", False),
    ),
    tensors=llama.tensors,
    fixed=dict(position="rotary", norm="rmsnorm", bias=False),
    rotary=True,
    read=_read,
    write=_write,
)
