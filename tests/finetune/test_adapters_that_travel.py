"""Adapters of PEFT start runs and come out of them again; merged models are compared before they are kept."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.errors import ConfigError
from jaxtrain.formats.safetensors import map_tensor, read_header

INTEROP = Path(__file__).parent.parent / "weights"
LLAMA, ADAPTER = INTEROP / "published" / "llama", INTEROP / "adapters" / "llama"
CONFIG = {
    "model": {"from": str(LLAMA)},
    "finetune": {"adapter": str(ADAPTER)},
    "data": {"kind": "synthetic", "task": "tokens", "vocab_size": 40, "sequence_length": 16, "num_rows": 64},
    "train": {"steps": 2, "global_batch_size": 8},
    "evaluation": {"every": None},
    "logging": {"report": False},
}


def tensors_of(folder):
    found = read_header(Path(folder) / "adapter_model.safetensors")
    return {name: map_tensor(tensor) for name, tensor in found.items()}


def logits_of(model, params, tokens):
    return jax.jit(lambda params, tokens: model.apply(params, {}, tokens, key=None, train=False)[0])(params, tokens)


def test_the_folder_gives_the_settings_and_what_is_set_beside_it_wins():
    lora = jt.load_config(CONFIG, overrides=["finetune.lora.dropout=0.1"]).config.finetune.lora
    targets = ("blocks/attention/query", "blocks/attention/value")
    assert lora == jt.LoraConfig(rank=4, alpha=8.0, dropout=0.1, targets=targets)
    with pytest.raises(ConfigError, match=r"finetune\.adapter=.*needs its base; set model\.from"):
        jt.load_config({**CONFIG, "model": {"kind": "transformer", "size": "gpt2"}})
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json"):
        jt.load_config(CONFIG, overrides=[f"finetune.adapter={LLAMA}"])


def test_a_step_starts_from_an_adapter():
    model, params = jt.load_adapter(ADAPTER, base=LLAMA)
    mesh = jt.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    adapted = jt.adapt(jt.load_pretrained(LLAMA).model, lora=model.adapted.lora)
    step = jt.make_train_step(adapted, jt.language_modeling(), optax.sgd(0.1), mesh=mesh)
    state = step.init(0, jt.load_weights(step, LLAMA, adapter=ADAPTER))
    for kernel in ("query", "value"):
        found, wanted = (tree["blocks"]["attention"][kernel]["kernel"] for tree in (state.params, params))
        np.testing.assert_array_equal(found.lora_a, wanted.lora_a)
        np.testing.assert_array_equal(found.lora_b, wanted.lora_b)
        np.testing.assert_array_equal(found.base, wanted.base)
    with pytest.raises(ConfigError, match="without its base"):
        jt.load_weights(step, None, adapter=ADAPTER)
    other = jt.adapt(jt.load_pretrained(LLAMA).model, lora=model.adapted.lora.model_copy(update={"alpha": 9.0}))
    other = jt.make_train_step(other, jt.language_modeling(), optax.sgd(0.1))
    with pytest.raises(ConfigError, match="has rank 4 and scale 2, but"):
        jt.load_weights(other, LLAMA, adapter=ADAPTER)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A run made of an adapter."""
    from jaxtrain.run.import_run import import_run

    return import_run(ADAPTER, tmp_path_factory.mktemp("travel") / "run", base=LLAMA)


def test_an_imported_adapter_comes_out_as_it_came_in(imported, cli, tmp_path):
    answer = cli("export", str(imported), "-o", str(tmp_path / "out"))
    assert (answer.code, answer.out) == (0, f"{tmp_path / 'out'}\n"), answer.err
    before, after = tensors_of(ADAPTER), tensors_of(tmp_path / "out")
    assert set(before) == set(after)
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor)
    said = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    wanted = json.loads((ADAPTER / "adapter_config.json").read_text())
    kept = ("r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "fan_in_fan_out", "task_type", "bias")
    assert {key: said[key] for key in kept} == {key: wanted[key] for key in kept}
    assert said["base_model_name_or_path"] == str(LLAMA)


@pytest.mark.long
def test_merged_weights_give_the_logits_of_base_and_adapter(imported, cli, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    answer = cli("export", str(imported.resolve()), "-o", ".", "--merge")  # a folder that is empty, and has no name
    assert answer.code == 0, answer.err
    wanted = dict(np.load(ADAPTER / "expected.npz"))
    merged = jt.load_pretrained(tmp_path / "out")
    logits = logits_of(merged.model, merged.params, jnp.asarray(wanted["tokens"], jnp.int32))
    # As of the base in tests/weights/test_families.py.
    np.testing.assert_allclose(logits, wanted["logits"], rtol=0, atol=1e-4 * np.ptp(wanted["logits"]))


@pytest.mark.long
def test_a_quantized_base_is_merged_as_floats(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli("import", str(ADAPTER), "finetune.base=nf4", "--base", str(LLAMA), "-o", "run").code == 0
    answer = cli("export", "run", "-o", "out", "--merge")
    assert answer.code == 0, answer.err
    run, tokens = jt.open_run("run"), jnp.arange(16, dtype=jnp.int32)[None]
    adapted = logits_of(run.sharded_model.model, run.params, tokens)
    merged = jt.load_pretrained("out")
    # Products of the base in few bits are summed in another order than those of its floats.
    found = logits_of(merged.model, merged.params, tokens)
    np.testing.assert_allclose(found, adapted, rtol=0, atol=1e-4 * np.ptp(adapted))


@pytest.mark.long
def test_a_run_in_bf16_is_merged_into_the_base_as_it_is_stored(imported, cli, tmp_path, monkeypatch):
    """The base that it computes with is rounded; what is written equals the merge of a run in fp32 to the last bit."""
    monkeypatch.chdir(tmp_path)
    words = ("import", str(ADAPTER), "precision.policy=bf16", "--base", str(LLAMA), "-o", "run")
    assert cli(*words).code == 0
    for run, out in (("run", "out"), (str(imported), "wanted")):
        assert cli("export", run, "-o", out, "--merge").code == 0
    assert Path("out/model.safetensors").read_bytes() == Path("wanted/model.safetensors").read_bytes()


@pytest.mark.long
def test_a_run_starts_from_an_adapter_and_needs_it_no_more(tmp_path):
    shutil.copytree(ADAPTER, tmp_path / "adapter")
    config = {**CONFIG, "finetune": {"adapter": str(tmp_path / "adapter")}}
    first = jt.run_config(config, run_dir=tmp_path / "run")
    shutil.rmtree(tmp_path / "adapter")
    again = jt.run_config(tmp_path / "run", overrides={"train.steps": 3})
    assert (first.step, again.step) == (2, 3)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("import", "ADAPTER", "-o", "x"), 2, "with --base FOLDER"),
        (("import", "ADAPTER", "--base", "OTHER", "-o", "x"), 4, "another base"),
        (("export", "LLAMA", "-o", "x", "--merge"), 2, "--merge does not apply to a copy of a published model"),
    ],
    ids=["no_base", "other_base", "a_folder_to_merge"],
)
def test_mistakes_are_one_line(imported, cli, tmp_path, monkeypatch, words, code, said):
    monkeypatch.chdir(tmp_path)
    names = {"ADAPTER": ADAPTER, "LLAMA": LLAMA, "RUN": imported, "OTHER": INTEROP / "published" / "gpt2"}
    answer = cli(*(str(names.get(word, word)) for word in words))
    lines = [line for line in answer.err.splitlines() if line.startswith("jaxtrain:")]
    assert (answer.code, len(lines)) == (code, 1), answer.err
    assert said in lines[0]
    assert not list(tmp_path.iterdir())
