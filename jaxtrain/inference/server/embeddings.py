"""Bodies of /v1/embeddings and their answers."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.inference.server.bodies import check_model, read_prompts
from jaxtrain.inference.server.fields import Field, no_effect, read_fields, text, unsupported, wrong
from jaxtrain.inference.server.prompts import PromptReader
from jaxtrain.inference.server.refused import RefusedError

_MOST_TEXTS = 2048


def _encoding(value: Any, name: str) -> str:
    if value not in ("float", "base64"):
        raise wrong(value, name, '"float" or "base64"')
    return value


_FIELDS = {
    "model": Field(text, required=True),
    "input": Field(read_prompts, required=True),
    "encoding_format": Field(_encoding, "float"),
    "dimensions": Field(unsupported(instead="an embedding has the width of the model; leave it out")),
    "user": Field(no_effect),
}


def embedding_call(
    body: Mapping[str, Any], reader: PromptReader, *, served: str, length: int
) -> tuple[list[list[int]], str]:
    """What a body asks for.

    Args:
        body: from `parse_body`.
        reader: has the tokenizer.
        served: name of the model.
        length: tokens of the longest text.

    Returns:
        The ids of each text, special tokens included, and the form of the numbers: float or base64.

    Raises:
        RefusedError: a field is unknown, missing or wrong, or a text is too long.
    """
    fields = read_fields(body, _FIELDS)
    check_model(fields["model"], served)
    given = fields["input"]
    if len(given) > _MOST_TEXTS:
        raise RefusedError(400, f"input has {len(given)} texts; use at most {_MOST_TEXTS}", param="input")
    texts = []
    for one in given:
        is_text = isinstance(one, str)
        ids = (
            reader.checked(reader.encode(one, add_special_tokens=True), "input")
            if is_text
            else reader.of_tokens(one, name="input").tokens
        )
        if not ids:
            raise RefusedError(400, "input holds an empty text; leave it out", param="input")
        if len(ids) > length:
            raise RefusedError(
                400,
                f"a text of input has {len(ids)} tokens, and the model takes {length}; shorten it",
                param="input",
                code="context_length_exceeded",
            )
        texts.append(list(ids))
    return texts, fields["encoding_format"]


def embedding_answer(
    vectors_ND: np.ndarray, texts: Sequence[Sequence[int]], *, form: str, model: str
) -> dict[str, Any]:
    """The object of an answer.

    Args:
        vectors_ND: float32 [texts, D].
        texts: ids of each.
        form: float or base64.
        model: name of the model.
    """
    data = [
        {"object": "embedding", "index": index, "embedding": _numbers(vector_D, form)}
        for index, vector_D in enumerate(vectors_ND)
    ]
    count = sum(map(len, texts))
    return {"object": "list", "data": data, "model": model, "usage": {"prompt_tokens": count, "total_tokens": count}}


def _numbers(vector_D: np.ndarray, form: str) -> list[float] | str:
    if form == "base64":
        return base64.b64encode(vector_D.astype("<f4").tobytes()).decode()
    return vector_D.tolist()
