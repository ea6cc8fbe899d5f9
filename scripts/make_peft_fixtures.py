"""Make the tiny adapters of tests/weights/adapters/ with PEFT, over the folders of tests/weights/published/.

    ORACLE/bin/python scripts/make_peft_fixtures.py [NAME ...]

ORACLE is an environment with `pip install '.[oracle]'`. Every folder holds adapter_config.json and
adapter_model.safetensors as `save_pretrained` of PEFT writes them, with random factors (also those that PEFT starts at
zero), and expected.npz: `tokens` int64 [B, L], of an encoder-decoder also `decoder_tokens` [B, T], `attention_mask`
where the base's fixture has one, and `logits`, what PEFT computes. README.md is left out. The folders are committed.
"""

# pyright: reportMissingImports=false
import argparse
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers

TESTS = Path(__file__).resolve().parent.parent / "tests" / "weights"
TARGET, PUBLISHED = TESTS / "adapters", TESTS / "published"


@dataclass(frozen=True)
class Adapter:
    """An adapter to make.

    Attributes:
        base: folder of tests/weights/published/.
        task: `task_type` of PEFT; None for none.
        rank: of its factors; its alpha is twice as large.
        targets: `target_modules` of PEFT.
        settings: further arguments of peft.LoraConfig.
    """

    base: str
    task: str | None
    rank: int
    targets: str | list[str]
    settings: dict[str, Any] = field(default_factory=dict)


_OTHER_RANKS = {"rank_pattern": {"o_proj": 2, r"layers\.1\.mlp\.down_proj": 3}, "alpha_pattern": {"down_proj": 9}}
_LM, _CLASSES = "CAUSAL_LM", "SEQ_CLS"
ADAPTERS = {
    "llama": Adapter("llama", _LM, 4, ["q_proj", "v_proj"]),
    "llama_all": Adapter("llama", _LM, 3, "all-linear", dict(use_rslora=True, lora_dropout=0.1)),
    # Ranks and scales of their own, a regular expression, and one layer of two.
    "llama_patterns": Adapter("llama", _LM, 4, r".*\.(q_proj|o_proj|down_proj)", _OTHER_RANKS),
    "llama_one_layer": Adapter("llama", _LM, 2, ["k_proj", "up_proj"], dict(layers_to_transform=[1])),
    "llama_sequence": Adapter("llama_sequence", _CLASSES, 2, ["q_proj", "gate_proj"]),
    "llama_embedding_saved": Adapter("llama", _LM, 2, ["v_proj"], dict(modules_to_save=["embed_tokens", "norm"])),
    "gpt2": Adapter("gpt2", _LM, 4, ["c_attn", "attn.c_proj", "c_fc"], dict(fan_in_fan_out=True)),
    "bert_sequence": Adapter("bert_sequence", _CLASSES, 2, ["query", "value"]),
    "bert_base": Adapter("bert_base", None, 2, ["key", "intermediate.dense"]),
    "t5": Adapter("t5", "SEQ_2_SEQ_LM", 2, ["q", "v", "wo"]),
    "phi3": Adapter("phi3", _LM, 2, ["qkv_proj", "gate_up_proj", "down_proj"]),
    "gpt_neox": Adapter("gpt_neox", _LM, 2, ["query_key_value", "dense_4h_to_h", "attention.dense"]),
}


def randomise(model: Any, seed: int) -> None:
    """Give every trained number a random value, so that the adapter moves the outputs."""
    generator = np.random.default_rng(seed)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            if parameter.requires_grad:
                values = parameter.numpy() + 0.3 * generator.standard_normal(tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(values.astype(np.float32)))


def outputs(model: Any, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return the logits of a model, or its last hidden state where it has no head."""
    given: dict[str, Any] = {"input_ids": torch.from_numpy(arrays["tokens"])}
    for ours, theirs in (
        ("attention_mask", "attention_mask"),
        ("token_type_ids", "token_type_ids"),
        ("decoder_tokens", "decoder_input_ids"),
    ):
        if ours in arrays:
            given[theirs] = torch.from_numpy(arrays[ours])
    with torch.no_grad():
        found = model(**given)
    return (found.logits if "logits" in found else found.pooler_output).float().numpy()


def make(name: str) -> None:
    """Make one folder."""
    adapter = ADAPTERS[name]
    folder = PUBLISHED / adapter.base
    known = dict(np.load(folder / "expected.npz"))
    kept = ("tokens", "attention_mask", "token_type_ids", "decoder_tokens")
    arrays = {key: known[key] for key in kept if key in known}
    architecture = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])

    def base() -> Any:
        return architecture.from_pretrained(folder, attn_implementation="eager").float().eval()

    sizes: dict[str, Any] = dict(r=adapter.rank, lora_alpha=2 * adapter.rank, target_modules=adapter.targets)
    model = peft.get_peft_model(base(), peft.LoraConfig(task_type=adapter.task, **sizes, **adapter.settings)).eval()
    randomise(model, seed=len(name))
    logits = outputs(model, arrays)
    plain = outputs(base(), arrays)
    assert np.abs(logits - plain).max() > 1e-2 * np.ptp(plain), f"{name} moves nothing"
    shutil.rmtree(TARGET / name, ignore_errors=True)
    (TARGET / name).mkdir(parents=True)
    with tempfile.TemporaryDirectory() as made:
        model.save_pretrained(made)
        config = json.loads((Path(made) / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = adapter.base
        # The order of a set is another one in each process.
        for key in ("target_modules", "modules_to_save"):
            if isinstance(config[key], list):
                config[key] = sorted(config[key])
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (TARGET / name / "adapter_config.json").write_text(text, encoding="utf-8")
        shutil.copyfile(Path(made) / "adapter_model.safetensors", TARGET / name / "adapter_model.safetensors")
    again = outputs(peft.PeftModel.from_pretrained(base(), TARGET / name).eval(), arrays)
    assert np.abs(again - logits).max() < 1e-6 * np.ptp(logits), f"{name} reads back to other logits"
    np.savez_compressed(TARGET / name / "expected.npz", allow_pickle=False, **arrays, logits=logits)
    size = sum(file.stat().st_size for file in (TARGET / name).iterdir())
    print(f"{name}: {size / 1000:.0f} kB, peft {peft.__version__}, transformers {transformers.__version__}", flush=True)


def main() -> None:
    """Make the folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="adapters to make; all, where none is named")
    names = parser.parse_args().names
    torch.set_num_threads(1)
    unknown = set(names) - set(ADAPTERS)
    if unknown:
        raise SystemExit(f"no adapter is called {sorted(unknown)}; there are {list(ADAPTERS)}")
    for name in ADAPTERS:
        if not names or name in names:
            make(name)


if __name__ == "__main__":
    main()
