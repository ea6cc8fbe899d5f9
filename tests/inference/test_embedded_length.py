"""Texts to embed are as long as the model has positions, at most."""

from typing import Any

import pytest
from scripted import TOKENIZER

from jaxtrain.errors import ConfigError
from jaxtrain.inference.server.served import Served
from jaxtrain.inference.server.service import embedded_length

NOTHING: Any = None
ROWS = {
    "those of the model": (512, None, 512),
    "a longer model": (131_072, None, 4096),
    "a model that does not say": (None, None, 4096),
    "fewer by request": (512, 40, 40),
}


def served(positions: int | None) -> Served:
    return Served("mini", NOTHING, NOTHING, {}, TOKENIZER, None, True, 0, positions)


@pytest.mark.parametrize(("positions", "asked", "length"), ROWS.values(), ids=ROWS)
def test_the_length_is_that_of_the_model(positions, asked, length):
    assert embedded_length(served(positions), asked) == length


def test_a_length_beyond_the_model_is_one_line():
    with pytest.raises(ConfigError, match="--length 513 exceeds the 512 positions of mini"):
        embedded_length(served(512), 513)
