"""The configs, values, files, command lines and calls that `mutate_configs.py` puts together."""

import json
import os
from pathlib import Path
from typing import Any

_QUICK: dict[str, Any] = {
    "train": {"steps": 1, "global_batch_size": 4},
    "checkpoint": {"every": None},
    "logging": {"every": 1, "report": False, "tensorboard": False},
    "evaluation": {"max_batches": 1},
}
_TABLE = {"kind": "synthetic", "task": "table", "num_rows": 16, "num_columns": 4, "num_classes": 3}
_IMAGES = {"kind": "synthetic", "task": "images", "num_rows": 16, "image_size": 8, "num_classes": 3}
_TOKENS = {"kind": "synthetic", "task": "tokens", "num_rows": 16, "vocab_size": 16, "sequence_length": 16}
_MLP = {"kind": "mlp", "hidden_dims": [4]}
_SMALL = {"num_layers": 2, "embed_dim": 8, "num_heads": 2, "mlp_dim": 8, "max_sequence_length": 16}
_ENCODER = {**_SMALL, "causal": False, "max_sequence_length": 16}
_BYTES = {"kind": "byte"}

# Small configs that together read every key.
BASES: dict[str, dict[str, Any]] = {
    "mlp": {"task": "classification", "model": _MLP, "data": _TABLE},
    "sgd": {"task": "classification", "model": _MLP, "data": _TABLE, "optimizer": {"kind": "sgd"}},
    "lion": {"task": "classification", "model": _MLP, "data": _TABLE, "optimizer": {"kind": "lion"}},
    "muon": {"task": "classification", "model": _MLP, "data": _TABLE, "optimizer": {"kind": "muon"}},
    "adafactor": {"task": "classification", "model": _MLP, "data": _TABLE, "optimizer": {"kind": "adafactor"}},
    "resnet": {
        "task": "classification",
        "model": {"kind": "resnet", "stem": "small", "stage_blocks": [1], "width": 4},
        "data": _IMAGES,
    },
    "vit": {
        "task": "classification",
        "model": {"kind": "vit", "num_layers": 1, "embed_dim": 8, "num_heads": 2, "mlp_dim": 8, "patch_size": 4},
        "data": _IMAGES,
    },
    "tokens": {"model": _SMALL, "data": _TOKENS},
    "experts": {
        "model": {**_SMALL, "experts": {"num_experts": 2, "experts_per_token": 1}},
        "data": _TOKENS,
        "evaluation": {"every": 1, "max_batches": 1, "early_stopping": {"patience": 1}},
        "profile": {"start_step": None},
    },
    "rope": {
        "model": {**_SMALL, "rope_scaling": {"kind": "llama3", "factor": 2.0, "original_length": 8}},
        "data": _TOKENS,
        "finetune": {"lora": {"rank": 2}},
    },
    "yarn": {
        "model": {
            **_SMALL,
            "rope_scaling": {"kind": "yarn", "factor": 2.0, "original_length": 8},
            "local_layers": {"pattern": [1, 0], "window": 4},
        },
        "data": _TOKENS,
    },
    "longrope": {
        "model": {
            **_SMALL,
            "rope_scaling": {
                "kind": "longrope",
                "short_factors": [1.0, 1.0],
                "long_factors": [2.0, 2.0],
                "original_length": 8,
            },
        },
        "data": _TOKENS,
    },
    "text": {"model": _SMALL, "data": {"kind": "text", "path": "text.txt", "tokenizer": _BYTES}},
    "bpe": {
        "model": _SMALL,
        "data": {"kind": "jsonl", "path": "text.jsonl", "tokenizer": {"kind": "bpe", "vocab_size": 300}},
    },
    "masked": {
        "task": "masked_language_modeling",
        "model": {**_ENCODER, "head": {"kind": "masked_language_model"}},
        "data": {**_TOKENS, "corruption": {"kind": "mask"}},
    },
    "spans": {
        "task": "sequence_to_sequence",
        "model": {"kind": "encoder_decoder", **_SMALL, "num_layers": 1, "max_sequence_length": 32},
        "data": {**_TOKENS, "sequence_length": 32, "corruption": {"kind": "spans"}},
    },
    "pairs": {
        "task": "sequence_to_sequence",
        "model": {"kind": "encoder_decoder", **_SMALL, "num_layers": 1},
        "data": {"kind": "text_pairs", "path": "rows.csv", "source": "text", "target": "other", "tokenizer": _BYTES},
    },
    "labels": {
        "task": "classification",
        "model": {**_ENCODER, "head": {"kind": "sequence"}},
        "data": {"kind": "labelled_text", "path": "rows.csv", "tokenizer": _BYTES},
    },
    "tags": {
        "task": "token_classification",
        "model": {**_ENCODER, "head": {"kind": "token"}},
        "data": {"kind": "tagged_text", "path": "tags.jsonl", "tokenizer": _BYTES},
    },
    "chat": {
        "model": {**_SMALL, "max_sequence_length": 64},
        "data": {"kind": "chat", "path": "chat.jsonl", "template": "chatml", "tokenizer": _BYTES},
    },
    "dpo": {
        "task": "dpo",
        "model": {**_SMALL, "max_sequence_length": 64},
        "data": {"kind": "chat", "path": "dpo.jsonl", "template": "chatml", "tokenizer": _BYTES},
        "loss": {"beta": 0.1},
    },
    "table": {"task": "classification", "model": _MLP, "data": {"kind": "table", "path": "table.csv"}},
    "mixture": {
        "model": _SMALL,
        "data": {
            "kind": "mixture",
            "components": [{"source": {"kind": "text", "path": "text.txt"}, "weight": 1.0}],
            "tokenizer": _BYTES,
        },
    },
}

# Values as they are written after `key=`: their name is shown in place of the long ones.
# The bounds of the schema, the largest first.
LARGEST = (
    "1.0e+30",
    "1000000000",
    "16777216",
    "1048576",
    "1000000",
    "65536",
    "10000",
    "4096",
    "1024",
    "500",
    "100",
    "1.0",
)
LARGEST += ("0.999",)

# Cases that train to no loss -> why that is right.
NO_LOSS = {"masked data.corruption.probability=1e-3": "no token of the batch is masked, so that none has a loss"}

VALUES: dict[str, str] = {
    **{text: text for text in ("0", "-1", "1", "2", "3", "7", "0.5", "-0.5", "1e-3", "1e5", "1e23", "1e308", "1e-300")},
    **{text: text for text in ("1e400", ".nan", ".inf", "-.inf", "true", "false", "null", "auto", "abc", "[]", "[1]")},
    **{text: text for text in ("[a, b]", "{}", "{a: 1}", "{kind: x}", "'1'", "''", "' '", "../../x", "/", ".", "~")},
    "a whole 1e23": "1" + "0" * 23,
    "2^31": str(2**31),
    "2^63": str(2**63),
    "999999999": "999999999",
    "999999999999": "999999999999",
    "5000 digits": "9" * 5000,
    "hex of 5000 digits": "0x" + "f" * 5000,
    "0.99999999999": "0.99999999999",
    "escape codes": '"\\e[31mred\\e[0m"',
    "NUL": '"a\\0b"',
    "line end": '"a\\nb"',
    "half a character": '"\\ud800"',
    "unicode": "'ünïcødé 😀 \u202eright to left'",
    "300 characters": "a" * 300,
    "20000 characters": "a" * 20000,
    "list of 2000": "[" + ", ".join(["1"] * 2000) + "]",
    "nested 30 deep": "[" * 30 + "]" * 30,
    "mapping of 300": "{" + ", ".join(f"k{i}: {i}" for i in range(300)) + "}",
    "a tag of Python": "!!python/object/apply:os.getcwd []",
}

COMMANDS: list[list[str]] = [
    *([word] for word in ("", "\x1b[31m", "trian", "-x", "--nothing", "a" * 300)),
    *(
        ["train", word]
        for word in ("", "a" * 300, ".", "..", "/", "/dev/null", "/dev/zero", "\x1b]0;title\x07", "gs://b")
    ),
    *(["train", "quickstart", word] for word in ("=5", ".=3", "a..b=1", "train.steps", "train.steps==5", "train=5")),
    *(
        ["train", "quickstart", word]
        for word in ("[=1", "model=", "train.steps=[", "train.steps=&a [*a]", "model=null")
    ),
    *(["train", "quickstart", word] for word in ("--run-dir=", "--run-dir=gs://b/x", "--resume=maybe", "--emulate=0")),
    *(["train", "quickstart", f"--emulate={n}"] for n in ("-1", "1e9", "9" * 30, "abc")),
    *(
        ["train", "quickstart", f"name={name}"]
        for name in (
            "..",
            ".",
            "/x",
            "../../x",
            "''",
            "' '",
            '"a\\nb"',
            '"a\\0b"',
            '"\\e[31m"',
            "a" * 300,
            "a//b",
            "[1]",
        )
    ),
    *(["train", "quickstart", f"{group}.call=os.path:join"] for group in ("model", "optimizer", "task", "data")),
    *(["config", word] for word in ("", "a" * 300, "/dev/zero", "..", "quickstart=1")),
    *(["config", "quickstart", word] for word in ("--only=", "--only=\x1b[31m", "a.b.c.d=1", "--only=" + "a" * 300)),
    *(
        [*command.split(), path]
        for command in ("eval", "report", "ckpt ls", "ckpt show", "export", "serve", "sample -p x")
        for path in ("nothing", "", "/dev/null", "/dev/zero", "a" * 300, "\x1b[31m", "gs://b/x")
    ),
    *(["predict", path, "rows.csv"] for path in ("nothing", "", "/dev/zero", "a" * 300)),
    *(["serve", "nothing", f"--port={port}"] for port in ("-1", "99999999", "abc")),
    *(
        ["sample", "nothing", "-p", "x", option]
        for option in ("--temperature=nan", "--tokens=-1", "--top-p=7", "--seed=x")
    ),
    *(
        ["launch", "--processes", count, "--", "train", "quickstart", "train.steps=0"]
        for count in ("0", "-1", "abc", "1e9")
    ),
    *(["plan", word] for word in ("", "a" * 300, "nothing")),
]

FITS = [
    *(
        f"steps={value}"
        for value in ("0", "-1", "1.5", "1e23", "10**23", "nan", "'5'", "None", "[1]", "True", "np.int64(1)")
    ),
    *(f"steps=None, epochs={value}" for value in ("0", "-1", "nan", "inf", "'5'", "1e300", "1e-300", "0.1")),
    *(
        f"batch_size={value}"
        for value in ("0", "-4", "1e12", "10**12", "10**30", "2.5", "'4'", "nan", "3", "999999999")
    ),
    *(f"seed={value}" for value in ("-1", "2**32", "10**30", "1.5", "'a'", "nan", "None", "np.uint32(7)")),
    *(f"accumulation_steps={value}" for value in ("0", "3", "10**23", "1e23", "'2'", "4")),
    *(f"clip_norm={value}" for value in ("0", "-1", "nan", "inf", "1e300", "1e-300", "'1'")),
    *(f"ema_decay={value}" for value in ("0", "1", "2", "0.99999999999", "nan", "'a'")),
    *(f"learning_rate={value}" for value in ("nan", "inf", "'a'", "1e300", "-1")),
    *(
        f"run_dir={value}"
        for value in ("''", "'a' + chr(0)", "'x' * 300", "'gs://b/x'", "5", "'/proc/x'", "'/dev/null/x'")
    ),
    *(f"validation={value}" for value in ("0", "1", "-0.1", "nan", "5", "'a'", "{}", "0.5")),
    *(f"policy={value}" for value in ("'fp64'", "None", "5", "''")),
    *(
        f"overrides={value}"
        for value in ("{'train.steps': 10**23}", "{'': 1}", "{5: 1}", "{'a': {}}", "[1]", "{'name': '..'}")
    ),
    "data={}",
    "data={'inputs': x}",
    "data={'inputs': x[:0], 'targets': y[:0]}",
    "data={'inputs': x, 'targets': y + 99}",
    "data={'inputs': x, 'targets': y[:3]}",
    "data=[1, 2]",
    "data=None",
    "data=x",
    "data={'inputs': np.array([object()] * 8), 'targets': y}",
    "data={'inputs': x.astype('S4'), 'targets': y}",
]


def write_files(folder: Path) -> None:
    """Writes the configs of `BASES`, the data that they read, and the wrong config files below `wrong`."""
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (folder / "text.jsonl").write_text('{"text": "the quick brown fox jumps over the lazy dog"}\n' * 20)
    (folder / "rows.csv").write_text("text,other,label\n" + "some words,other words,a\nmore of them,and so on,b\n" * 12)
    (folder / "tags.jsonl").write_text('{"words": ["some", "words"], "tags": ["A", "B"]}\n' * 20)
    (folder / "table.csv").write_text("a,b,c\n" + "1.0,2.0,x\n2.0,1.0,y\n" * 12)
    turn = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (folder / "chat.jsonl").write_text((json.dumps({"messages": turn}) + "\n") * 20)
    pair = {"prompt": turn[:1], "chosen": turn[1:], "rejected": [{"role": "assistant", "content": "No"}]}
    rows = [json.dumps(pair | {"prompt": [{"role": "user", "content": f"Hi {i}"}]}) + "\n" for i in range(20)]
    (folder / "dpo.jsonl").write_text("".join(rows))
    for name, settings in BASES.items():
        merged = {group: dict(values) for group, values in _QUICK.items()}
        for group, values in settings.items():
            merged[group] = {**merged.get(group, {}), **values} if isinstance(values, dict) else values
        data = merged["data"]
        if "path" in data:
            data["path"] = str(folder / data["path"])
        if name == "mixture":
            data = json.loads(json.dumps(data))
            data["components"][0]["source"]["path"] = str(folder / "text.txt")
            merged["data"] = data
        (folder / f"{name}.yaml").write_text(json.dumps(merged))  # YAML reads JSON
    _write_wrong(folder / "wrong")


def _write_wrong(folder: Path) -> None:
    folder.mkdir()
    texts: dict[str, str | bytes] = {
        "key_of_lists.yaml": "? [[a, b], c]\n: 1\n",
        "utf16.yaml": "seed: 1\n".encode("utf-16"),
        "utf32.yaml": "seed: 1\n".encode("utf-32"),
        "bom.yaml": b"\xef\xbb\xbfseed: -1\n",
        "nul.yaml": b"seed: 1\0\n",
        "binary.yaml": bytes(range(256)) * 40,
        "elf.yaml": b"\x7fELF" + os.urandom(4096),
        "latin1.yaml": "name: caf\xe9\n".encode("latin-1"),
        "escapes.yaml": 'name: "\\e]0;title\\a"\n',
        "value_200k.yaml": "name: " + "a" * 200_000 + "\n",
        "comment_200k.yaml": "# " + "a" * 200_000 + "\nseed: -1\n",
        "quotes.yaml": "name: '" + "''" * 50_000,
        "two_documents.yaml": "seed: 1\n---\nseed: 2\n",
        "a list.yaml": "- 1\n- 2\n",
        "tabs.yaml": "\ttrain: 1\n",
        "json with twice.yaml": '{"seed": 1, "seed": 2}',
        "null.yaml": "model: null\ndata: ~\n",
        "\x1b[31mred.yaml": "seed: -1\n",
        "line\nend.yaml": "seed: -1\n",
    }
    for name, content in texts.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with (folder / "sparse_1g.yaml").open("wb") as file:
        file.truncate(1 << 30)
    os.mkfifo(folder / "pipe.yaml")
    (folder / "folder.yaml").mkdir()
    (folder / "loop.yaml").symlink_to("loop.yaml")
    (folder / "zero.yaml").symlink_to("/dev/zero")
