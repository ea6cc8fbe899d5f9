"""Exported folders say how the model chats and where its texts end, as the run that was exported does."""

import dataclasses
import datetime
import json

import jax
import pytest

import jaxtrain as jt
from jaxtrain.config.data import TokenizerConfig
from jaxtrain.config.published import settings_of
from jaxtrain.data.chat.conversation import Conversation
from jaxtrain.data.chat.templates import BUILT_IN, ChatFormat, compile_template, render
from jaxtrain.data.tokenizer import build_tokenizer
from jaxtrain.inference.open import open_model
from jaxtrain.inference.prompts import PromptReader, SpecialTokens
from jaxtrain.inference.published import exported_texts
from jaxtrain.run.import_run import import_run
from jaxtrain.weights.write import Origin, Texts, companions, write_published

GROUP = {"kind": "transformer", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 32, "vocab_size": 288}
BEGINS, ENDS = "<|im_start|>", "<|im_end|>"
# Ids: <|endoftext|> 0, <|im_start|> 257, <|im_end|> 258.
BPE = build_tokenizer(TokenizerConfig(kind="bpe", vocab_size=259), ["text"], special=(BEGINS, ENDS))
MODEL = jt.build_model(GROUP, input_shape=(8,))
NAMED = {"bos_token": BEGINS, "eos_token": ENDS}


def origin(*, template=BUILT_IN["chatml"], file=False, config=None, generation=None):
    """The published model of a run."""
    settings = dict(NAMED) if template is None or file else NAMED | {"chat_template": template}
    files = {"tokenizer.json": "{}", "tokenizer_config.json": json.dumps(settings).encode()}
    files |= {"chat_template.jinja": template} if file else {}
    files |= {} if generation is None else {"generation_config.json": json.dumps(generation)}
    return Origin({"eos_token_id": 258, "bos_token_id": 257} if config is None else config, files, {})


def reading(template="chatml", *, stop=(258,), tokens=NAMED):
    return {"data": {"reading": ChatFormat(BUILT_IN[template], f"{template} (built in)", tokens, stop).to_reading()}}


# id: (run.json, origin, template, tokens, ids)
ALL = {"eos_token_id": [258, 0]}
ENDED = {"eos_token": "<|endoftext|>"}
FOUND = {
    "text": ({}, None, None, ENDED, {"eos_token_id": 0}),
    "chats": (reading(), None, BUILT_IN["chatml"], NAMED, ALL),
    "text, from a published model": ({}, origin(), None, {}, {}),
    "chats, from a published model": (reading("plain"), origin(), BUILT_IN["plain"], NAMED, ALL),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_the_folder_says_is_what_the_run_was_trained_with(name):
    info, start, template, tokens, ids = FOUND[name]
    assert exported_texts(info, BPE, start, MODEL) == Texts(template, tokens, ids)


@pytest.mark.parametrize("file", [False, True], ids=["in tokenizer_config.json", "a file of its own"])
def test_a_template_takes_the_place_of_that_of_the_published_model(file):
    given = origin(file=file, generation={"eos_token_id": 258, "top_p": 0.9})
    texts = Texts("new", {"eos_token": "<|endoftext|>"}, {"eos_token_id": 0})
    found = companions(given.config, given.files, texts)
    settings = json.loads(found["tokenizer_config.json"])
    assert {**settings, "chat_template": "new"} == {**NAMED, "eos_token": "<|endoftext|>", "chat_template": "new"}
    assert (found.get("chat_template.jinja"), settings.get("chat_template")) == (
        ("new", None) if file else (None, "new")
    )
    assert json.loads(found["generation_config.json"]) == {"eos_token_id": 0, "top_p": 0.9}
    assert companions(given.config, given.files, Texts()) == given.files


def test_every_family_says_where_a_text_ends(tmp_path):
    family = {"position": "learned", "norm": "layernorm", "activation": "gelu", "bias": True}  # of GPT-2
    model = jt.load_config({"model": {**GROUP, **family}}).config.model
    params, _ = jax.jit(jt.build_model(model, input_shape=(8,)).init)(jax.random.key(0))
    texts = dataclasses.replace(exported_texts({}, BPE, None, MODEL), tokenizer=BPE.to_json())
    write_published(tmp_path / "out", settings_of(model), params, {}, texts=texts)
    said = {file.name: json.loads(file.read_text()) for file in (tmp_path / "out").glob("*.json")}
    config = said["config.json"]
    keys = ("model_type", "bos_token_id", "eos_token_id", "pad_token_id")
    assert [config[key] for key in keys] == ["gpt2", None, 0, None]
    assert said["generation_config.json"] == {"eos_token_id": 0}
    assert said["tokenizer_config.json"]["eos_token"] == "<|endoftext|>"


def asked(form, tokenizer):
    """How a question is written, and the ids at which its answer ends."""
    template = compile_template(form, today=datetime.date(2024, 7, 26))
    text = render(template, Conversation("here", ({"role": "user", "content": "Why?"},)), prompt=True).text
    return text, PromptReader(tokenizer, form, SpecialTokens()).stop_tokens


def of_run(path):
    run = jt.open_run(path)
    return asked(run.chat, run.tokenizer)


def of_folder(path):
    served = open_model(path)
    return asked(served.chat, served.tokenizer)


@pytest.mark.long
def test_runs_on_chats_and_their_folders_chat_alike(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"What is {i}?", "completion": f"It is {i}."} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["data.kind=chat", "data.path=rows.jsonl", "data.sequence_length=96", "evaluation.sample_prompt=null"]
    words += ["train.steps=1", "train.global_batch_size=8", "evaluation.every=null", "logging.report=false"]
    words += ["optimizer.schedule.warmup_steps=0", "logging.tensorboard=false"]
    sizes = [f"model.{key}={GROUP[key]}" for key in ("num_layers", "embed_dim", "num_heads", "mlp_dim")]
    sizes += ["model.max_sequence_length=128", "data.tokenizer.vocab_size=280"]

    def done(*command):
        answer = cli(*command)
        assert answer.code == 0, answer.err
        return answer

    done("train", "quickstart", *words, *sizes, "--run-dir", "own")
    done("export", "own", "-o", "base")
    import_run("base", "imported")
    text, ends = of_run("own")
    assert text == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert of_folder("base") == of_run("imported") == (text, ends)
    assert set(json.loads((tmp_path / "base" / "config.json").read_text())["eos_token_id"]) == ends
    # Over it, another template, which ends answers with another token.
    short = "{% for message in messages %}{{ message['content'] }}<|endoftext|>{% endfor %}"
    (tmp_path / "short.jinja").write_text(short)
    other = ["model.from=base", "finetune.lora.rank=2", "data.template=short.jinja", "data.stop=<|endoftext|>"]
    done("train", "quickstart", *words, *other, "--run-dir", "adapted")
    # The folder names both ends already: that of its answers, which is its end of text, and that of its documents.
    for folder, more in {"adapter": (), "merged": ("--merge",)}.items():
        done("export", "adapted", "-o", folder, *more)
    import_run("adapter", "imported_adapter", base="base")
    import_run("merged", "imported_merged")
    assert of_run("adapted") == ("Why?<|endoftext|>", ends)
    found = [of_folder("adapter"), of_folder("merged"), of_run("imported_adapter"), of_run("imported_merged")]
    assert found == [of_run("adapted")] * 4
