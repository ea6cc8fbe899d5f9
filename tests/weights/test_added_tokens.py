"""Tokens that are added to a published model: rows of its embedding and output that begin as the mean of the others."""

import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from tokenizers import Tokenizer, models

import jaxtrain as jt
from jaxtrain.config.kinds import check_sizes
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.formats.safetensors import open_folder
from jaxtrain.inference.export import export_run
from jaxtrain.run.import_run import import_run

PUBLISHED = Path(__file__).parent / "published"
OLD, NEW = 40, 43
# Family -> dim of the vocabulary of each parameter that has one.
FAMILIES = {
    "tied": ("gemma2", {"embedding": 0}),
    "untied": ("llama", {"embedding": 0, "output": 1}),
    "a bias": ("phi", {"embedding": 0, "output": 1, "output_bias": 0}),
}


@pytest.mark.parametrize(("name", "dims"), FAMILIES.values(), ids=FAMILIES)
def test_added_rows_are_the_mean(name, dims, capsys):
    published, grown = (jt.load_pretrained(PUBLISHED / name, model=model) for model in ({}, {"vocab_size": NEW}))
    line = f"the embedding has 3 rows more than {PUBLISHED / name}"
    assert [text.startswith(line) for text in capsys.readouterr().err.splitlines()] == [True]
    for path, array in published.params.items():
        if isinstance(array, dict):
            jax.tree.map(np.testing.assert_array_equal, array, grown.params[path])
            continue
        old, new = np.asarray(array), np.asarray(grown.params[path])
        if path in dims:
            old, new = np.moveaxis(old, dims[path], 0), np.moveaxis(new, dims[path], 0)
            assert len(new) == NEW
            np.testing.assert_allclose(
                new[OLD:], old.mean(axis=0, keepdims=True).repeat(3, axis=0), rtol=1e-5, atol=1e-7
            )
        np.testing.assert_array_equal(new[: len(old)], old)
    with pytest.raises(CheckpointError, match="has other shapes"):
        jt.load_pretrained(PUBLISHED / name, model={"vocab_size": OLD - 1})


def test_a_step_starts_with_added_rows_on_a_mesh():
    grown = jt.load_pretrained(PUBLISHED / "llama", model={"vocab_size": 44})
    mesh = jt.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    step = jt.make_train_step(grown.model, jt.language_modeling(), optax.sgd(0.1), mesh=mesh)
    state = step.init(0, jt.load_weights(step, PUBLISHED / "llama"))
    jax.tree.map(np.testing.assert_array_equal, state.params, grown.params)


def test_an_adapter_has_the_added_rows(tmp_path):
    """As `modules_to_save`, which PEFT reads over a base that was made as large."""
    base = jt.load_pretrained(PUBLISHED / "llama", model={"vocab_size": NEW})
    lora = jt.LoraConfig(rank=2, targets=("query",), train_also=("embedding", "output"))
    adapted = jt.adapt(base.model, lora=lora)
    params, _ = jax.jit(adapted.init)(jax.random.key(0))
    folder = jt.save_adapter(tmp_path / "adapter", params, model=adapted, base=base)
    _, read = jt.load_adapter(folder, base=base)
    for name in lora.train_also:
        np.testing.assert_array_equal(read[name], params[name])
    config = {"model": {"from": str(PUBLISHED / "llama")}, "finetune": {"adapter": str(folder)}}
    loaded = jt.load_config(config, overrides=[f"model.vocab_size={NEW}"]).config
    assert loaded.finetune.lora is not None
    assert loaded.finetune.lora.train_also == lora.train_also
    with pytest.raises(CheckpointError, match=r"another base, or to model\.vocab_size of it"):
        jt.load_config(config)


def tokenizer(*added):
    found = Tokenizer(models.WordLevel({f"w{number}": number for number in range(OLD)}, unk_token="w0"))
    found.add_special_tokens(list(added))
    return found


def test_the_tokens_come_out_with_the_weights(tmp_path):
    base, added = tmp_path / "base", tmp_path / "tokenizer.json"
    shutil.copytree(PUBLISHED / "llama", base)
    tokenizer().save(str(base / "tokenizer.json"))
    tokenizer("<a>", "<b>", "<c>").save(str(added))
    overrides = [f"data.tokenizer.path={added}", "data.tokenizer.kind=file", f"model.vocab_size={NEW}"]
    config = {"model": {"from": str(base)}, "data": {"kind": "text"}}
    sizes = dict(num_outputs=None, sequence_length=None, decoder_length=None)
    with pytest.raises(ConfigError, match=r"below the 43 token ids of the data; set model\.vocab_size=43 to add rows"):
        check_sizes(jt.load_config(config).config, vocab_size=NEW, **sizes)
    out = export_run(import_run(base, tmp_path / "run", overrides=overrides), tmp_path / "out")
    assert open_folder(out).config["vocab_size"] == NEW
    assert Tokenizer.from_file(str(out / "tokenizer.json")).token_to_id("<c>") == NEW - 1
    written = jt.load_pretrained(out)
    jax.tree.map(
        np.testing.assert_array_equal, written.params, jt.load_pretrained(base, model={"vocab_size": NEW}).params
    )


@pytest.mark.long
def test_the_tokenizer_of_the_base_is_copied_byte_for_byte(tmp_path):
    base = tmp_path / "base"
    shutil.copytree(PUBLISHED / "llama", base)
    tokenizer("<a>").save(str(base / "tokenizer.json"), pretty=False)
    out = export_run(import_run(base, tmp_path / "run", overrides=["model.vocab_size=41"]), tmp_path / "out")
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
