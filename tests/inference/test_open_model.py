"""`jaxtrain.open_model`: one class for runs and published models, as the command line opens them."""

import json
from typing import Any

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.data.chat.templates import BUILT_IN
from jaxtrain.data.tokenizer import ByteTokenizer
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.inference.open import OpenedRun

GROUP = {
    "kind": "transformer", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_sequence_length": 32,
    "vocab_size": 258,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A published folder of a small transformer over bytes, which chats."""
    params, _ = jax.jit(jt.build_model(GROUP, input_shape=(32,)).init)(jax.random.key(0))
    folder = jt.save_pretrained(tmp_path_factory.mktemp("opened") / "tiny", params, model=GROUP)
    ByteTokenizer(("<|im_start|>", "<|im_end|>")).save(folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(BUILT_IN["plain"])
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return folder


def test_a_published_model_predicts_writes_and_evaluates(folder):
    model = jt.open_model(folder, mesh=jt.make_mesh(devices=jax.devices()[:1]))
    tokens = np.arange(64, dtype=np.int32).reshape(4, 16)
    pretrained = jt.load_pretrained(folder)
    expected, _ = pretrained.model.apply(pretrained.params, {}, tokens, key=None, train=False)
    # Other programs: a few units in the seventh digit.
    np.testing.assert_allclose(model.predict(tokens), expected, rtol=1e-4, atol=1e-5)
    greedy: dict[str, Any] = {"new_tokens": 4, "temperature": 0}
    text = model.sample("To be", **greedy)
    assert text.startswith("To be")
    assert model.sample(["To be", "a"], **greedy)[0] == text
    # The template writes a question as it is, and an answer stands alone.
    assert "To be" + model.sample("To be", chat=True, **greedy) == text
    loss = model.evaluate({"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})["eval_loss"]
    logs = np.asarray(jax.nn.log_softmax(expected[:, :-1]))
    assert loss == pytest.approx(-np.mean(np.take_along_axis(logs, tokens[:, 1:, None], -1)), rel=1e-5)
    with pytest.raises(DataError, match=r"is a published model, which comes without data; write evaluate\(rows\)"):
        model.evaluate()


def test_a_run_is_opened_with_its_history(tmp_path):
    config = {"model": {"kind": "mlp", "hidden_dims": [4]}, "task": "classification", "data": {"kind": "digits"}}
    config |= {"train": {"steps": 1, "global_batch_size": 8}, "logging.report": False, "logging.tensorboard": False}
    result = jt.run_config(config, run_dir=tmp_path / "run")
    run = jt.open_model(result.run_dir, overrides={"parallel.data": 2, "parallel.tensor": 4})
    assert isinstance(run, OpenedRun)
    assert run.step == 1
    assert run.history["step"].tolist() == [1]
    assert run.sharded_model.mesh.shape["tensor"] == 4
    assert run.predict(np.ones((3, 8, 8, 1), np.float32)).shape == (3, 10)


def test_what_does_not_fit_is_one_line(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"is for runs, which .*tiny is not"):
        jt.open_model(folder, step=3)
    with pytest.raises(ConfigError, match=r"is not a run: it has no run\.json"):
        jt.open_model(tmp_path)
