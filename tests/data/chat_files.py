"""What tests of chats share: the small tokenizer, templates of real families, files of rows."""

import json
from pathlib import Path

from jaxtrain.data.chat.rows import Conversation, masked_tokens
from jaxtrain.data.chat.templates import ChatEncoder, ChatFormat, compile_template
from jaxtrain.data.tokenizer import load_tokenizer

FOLDER = Path(__file__).resolve().parent / "chats"
CONVERSATIONS = json.loads((FOLDER / "conversations.json").read_text(encoding="utf-8"))
EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
TOKENIZER = load_tokenizer(FOLDER / "tokenizer.json")
ENCODER = ChatEncoder(TOKENIZER)
# Template -> the token that ends an answer.
STOPS = {
    **{"chatml": "<|im_end|>", "chatml_marked": "<|im_end|>", "qwen": "<|im_end|>", "smollm2": "<|im_end|>"},
    **{"llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "mistral": "</s>", "tools": "</s>"},
}


def template_of(name, *, source=None, stop=None):
    """The template of a file of the folder, or of a text."""
    from datetime import date

    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8") if source is None else source
    stop = TOKENIZER.token_id(stop or STOPS.get(name, "</s>"))
    form = ChatFormat(source, f"{name}.jinja", {"bos_token": "<s>", "eos_token": "</s>"}, (stop,))
    return compile_template(form, today=date(2024, 7, 26))


def masked(template, messages, *, train_on="answers", first=0):
    """A conversation as tokens."""
    return next(masked_tokens([Conversation("rows.jsonl:1", messages, first)], template, ENCODER, train_on=train_on))


def write_rows(folder, rows, *, name="rows.jsonl"):
    """Objects as a file of one format."""
    path = folder / name
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in rows))
    return str(path)


def messages(*texts):
    """User and assistant in turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
