"""A family as a package of somebody else adds it: Llama's tensors, with scales of its own."""

from jaxtrain.families import llama
from jaxtrain.families.family import Family, decoder_keys, fixed, mapped, own, rope_keys, size


def _read(ours, file):
    scale = file["score_factor"]
    return dict(
        attention_scale=None if scale == ours["head_dim"] ** -0.5 else scale,
        logits_scale=None if file["logits_divisor"] == 1 else 1 / file["logits_divisor"],
    )


def _write(model):
    scale, logits = model["attention_scale"], model["logits_scale"]
    return dict(
        score_factor=model["head_dim"] ** -0.5 if scale is None else scale,
        logits_divisor=1.0 if logits is None else 1 / logits,
    )


FAMILY = Family(
    name="scaled_llama",
    architecture="ScaledLlamaForCausalLM",
    keys=(
        *decoder_keys(size({}, 32, 4096, 32, vocab_size=32000, mlp_dim=11008, max_sequence_length=2048)),
        *rope_keys(10000.0),
        mapped("embedding_factor", "embedding_scale", 1.0),
        own("score_factor", 1.0),
        own("logits_divisor", 1.0),
        fixed("attention_bias", False),
        fixed("mlp_bias", False),
    ),
    tensors=llama.tensors,
    fixed=dict(position="rotary", norm="rmsnorm", bias=False),
    rotary=True,
    read=_read,
    write=_write,
)
