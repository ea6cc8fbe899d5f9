"""What looks like a secret is not written down, and what merely has such a word in its name is."""

import pytest

from jaxtrain.config import load_config
from jaxtrain.config.secrets import REDACTED, redacted, redacted_words
from jaxtrain.errors import ConfigError
from jaxtrain.runtime.remarks import print_remark

TOKEN = "hf_" + "a1B2" * 8
# id: (settings, what is written)
SETTINGS = {
    "key": ({"args": {"api_key": "abc"}}, {"args": {"api_key": REDACTED}}),
    "token": ({"token": "abc", "auth_token": "abc"}, {"token": REDACTED, "auth_token": REDACTED}),
    "password": ({"db_password": "abc"}, {"db_password": REDACTED}),
    "address": ({"path": "s3://me:pw@host/a"}, {"path": f"s3://{REDACTED}@host/a"}),
    "signed address": ({"url": "https://h/a?x=1&X-Amz-Signature=abc"}, {"url": f"https://h/a?x=1&X-Amz-Signature={REDACTED}"}),
    "token of a service": ({"names": [f"a {TOKEN}"]}, {"names": [f"a {REDACTED}"]}),
    "special tokens": ({"token": "<pad>", "mask_token": "[MASK]"}, {"token": "<pad>", "mask_token": "[MASK]"}),
    "numbers": ({"token": 5, "num_tokens": 7}, {"token": 5, "num_tokens": 7}),
    "digits": ({"password": 4711, "api_key": [1]}, {"password": REDACTED, "api_key": [REDACTED]}),
    "group": ({"credentials": {"user": "u", "pass": "p"}}, {"credentials": {"user": REDACTED, "pass": REDACTED}}),
    "other keys": ({"tokenizer": "a", "text_key": "b"}, {"tokenizer": "a", "text_key": "b"}),
    "column": ({"key": "image"}, {"key": "image"}),
    "no user": ({"url": "https://host:8080/a@b"}, {"url": "https://host:8080/a@b"}),
}  # fmt: skip


@pytest.mark.parametrize(("given", "kept"), SETTINGS.values(), ids=SETTINGS)
def test_settings(given, kept):
    assert redacted(given) == kept


def test_command_line():
    words = ["jaxtrain", "train", "model.args.api_key=abc", "--token", "abc", "train.steps=5", "data.path=a://u:p@h/x"]
    kept = ["jaxtrain", "train", f"model.args.api_key={REDACTED}", "--token", REDACTED, "train.steps=5"]
    assert redacted_words(words) == [*kept, f"data.path=a://{REDACTED}@h/x"]
    groups = ["data.args={path: x, 'api_key': \"a b\", token: <pad>, password: 5}", "a.credentials={pass: x}"]
    shown = [f"data.args={{path: x, 'api_key': {REDACTED}, token: <pad>, password: {REDACTED}}}"]
    assert redacted_words(groups) == [*shown, f"a.credentials={REDACTED}"]


def test_shipped_settings_are_no_secrets():
    saved = load_config("quickstart").config.model_dump(mode="json")
    assert redacted(saved) == saved


def test_a_secret_of_a_run_is_asked_for_again():
    saved = {"data": {"call": "a:b", "args": {"api_key": REDACTED}}}
    line = r"^data\.args\.api_key looked like a secret, so the run did not write it down; give it again: data\.args"
    with pytest.raises(ConfigError, match=line):
        load_config(saved)
    assert load_config(saved, overrides=["data.args.api_key=x"]).config.data.args == {"api_key": "x"}


def test_remarks_show_no_password(capsys):
    print_remark(f"jaxtrain: rows raised ValueError: s3://me:pw@host/a, {TOKEN}")
    assert capsys.readouterr().err == f"jaxtrain: rows raised ValueError: s3://{REDACTED}@host/a, {REDACTED}\n"
