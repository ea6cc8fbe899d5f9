"""The first space of texts as they are written, for tokenizers that write one before each word."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxtrain.data.tokenizer import BpeTokenizer
from jaxtrain.inference.pieces import Generated
from jaxtrain.inference.sampling import Sampling
from jaxtrain.inference.written import write_texts


@pytest.mark.parametrize(
    ("begins", "expected"),
    [(None, [" b", " b"]), ([False, True], [" b", "b"])],
    ids=["both follow a prompt", "the second prompt is empty"],
)
def test_only_a_text_that_stands_alone_loses_its_first_space(monkeypatch, begins, expected):
    made = Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "b": 2, "▁b": 3}, merges=[("▁", "b")]))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")  # pyright: ignore[reportAttributeAccessIssue] a setter
    made.decoder = decoders.Metaspace(prepend_scheme="first")  # pyright: ignore[reportAttributeAccessIssue] a setter
    found = Generated(np.full((2, 1), 3), np.ones(2, np.int32), None, None, None)
    monkeypatch.setattr("jaxtrain.inference.written.generation_pieces", lambda *_, **__: iter([found]))
    written = write_texts(
        None, None, BpeTokenizer(made), [np.zeros(1, np.int32)] * 2, new_tokens=1, sampling=Sampling(0), begins=begins
    )  # fmt: skip
    texts = ["", ""]
    for one in written:
        texts[one.row] += one.text
    assert texts == expected
