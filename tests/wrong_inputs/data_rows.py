"""Wrong inputs of what reads data, configs and checkpoints: (call, what was given, how to write it)."""

import dataclasses

import given
import grain
import jax
import numpy as np
from given import MASKED, X, Y

import jaxtrain as jt

NUMBERS = np.arange(4)
TARGET = {"w": jax.ShapeDtypeStruct((4,), np.float32)}


def device_shardings():
    return dict.fromkeys(given.batches().spec(), jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def batches_of(rows=None, size=8, seed=0, shuffle=True, workers=None):
    return jt.Batches(given.rows() if rows is None else rows, size, seed=seed, shuffle=shuffle, workers=workers)


ROWS = {
    "ArrayRows: a list": (lambda: jt.ArrayRows([X, Y]), "a list of 2", "ArrayRows({'inputs': "),
    "ArrayRows: an array": (lambda: jt.ArrayRows(X), "an array float32[8, 4]", "ArrayRows({'inputs': "),
    "ArrayRows: nothing": (lambda: jt.ArrayRows(None), "not None", "ArrayRows({'inputs': "),
    "ArrayRows: empty": (lambda: jt.ArrayRows({}), "it got none", "{'inputs': ..., 'targets': ...}"),
    "ArrayRows: a number as a column": (lambda: jt.ArrayRows({"inputs": 3}), "inputs has no", "arrays of one length"),
    "ArrayRows: lengths": (lambda: jt.ArrayRows({"inputs": X, "targets": Y[:3]}), "targets has 3", "one length"),
    "ArrayRows: objects": (lambda: jt.ArrayRows({"inputs": [object()]}), "inputs holds", "numbers"),
    "ArrayRows: text": (lambda: jt.ArrayRows({"inputs": ["a", "b"]}), "inputs holds", "numbers"),
    "ArrayRows: masked": (lambda: jt.ArrayRows({"inputs": MASKED}), "inputs is an array with masked", ".filled(0)"),
    "ArrayRows: a list of masked rows": (lambda: jt.ArrayRows({"inputs": [*MASKED]}), "with masked", ".filled(0)"),
    "ArrayRows: ragged": (lambda: jt.ArrayRows({"inputs": [[1], [1, 2]]}), "different lengths", "pad or crop"),
    "Batches: masked rows": (
        lambda: batches_of(grain.MapDataset.source([{"inputs": MASKED[i]} for i in range(8)])),
        "a row holds inputs with masked",
        ".filled(0)",
    ),
    "Batches: a dict": (lambda: batches_of({"inputs": X}), "a dict of inputs", "ArrayRows"),
    "Batches: an array": (lambda: batches_of(X), "'ndarray' object", "ArrayRows"),
    "Batches: data": (lambda: batches_of(given.data()), "'Data' object", "data.train"),
    "Batches: empty": (lambda: batches_of(jt.ArrayRows({"inputs": X[:0]})), "no rows", "at least one row"),
    "Batches: no size": (lambda: batches_of(size=0), "not 0", "Batches(rows, 32"),
    "Batches: a size of words": (lambda: batches_of(size="32"), "not '32'", "Batches(rows, 32"),
    "Batches: swapped": (lambda: jt.Batches(8, given.rows(), seed=0, shuffle=True), "'int' object", "ArrayRows"),
    "Batches: a seed of words": (lambda: batches_of(seed="a"), "not 'a'", "seed=0"),
    "Batches: shuffle as a word": (lambda: batches_of(shuffle="yes"), "not 'yes'", "shuffle=True"),
    "Batches: no workers": (lambda: batches_of(workers=0), "not 0", "workers="),
    "Batches.row_numbers: a batch below 0": (lambda: given.batches().row_numbers(-1), "not -1", "row_numbers(0)"),
    "Batches.load: a batch below 0": (lambda: given.batches().load(-1, device_shardings()), "not -1", "load(0, "),
    "Batches.load: a word": (lambda: given.batches().load("a", device_shardings()), "not 'a'", "load(0, "),
    "Batches.load: past the end": (
        lambda: given.batches().load(1, device_shardings()),
        "batch 1",
        "batches 0 to 0",
    ),
    "Batches.load: no sharding of an entry": (lambda: given.batches().load(0, {}), "'inputs'", "step.batch_shardings"),
    "Batches.load: no dict": (lambda: given.batches().load(0, None), "not None", "step.batch_shardings"),
    "Checkpointer: a number": (lambda: jt.Checkpointer(3), "not 3", "'runs/mine'"),
    "Checkpointer: another store": (lambda: jt.Checkpointer("hf://bucket/x"), "hf://bucket/x", "a local folder"),
    "Checkpointer: no bucket": (lambda: jt.Checkpointer("s3://No/x"), "s3://No can be no bucket", "lower-case"),
    "Checkpointer: keeps none": (
        lambda: jt.Checkpointer(given.folder(), keep_last=0),
        "keep_last is 0",
        "1 or more",
    ),
    "Checkpointer: reports to a word": (
        lambda: jt.Checkpointer(given.folder(), report="x"),
        "not 'x'",
        "report=print",
    ),
    "Checkpointer.info: a word": (lambda: given.checkpointer().info("a"), "step 'a'", "it holds"),
    "Checkpointer.metadata: no such step": (lambda: given.checkpointer().metadata(9), "step 9", "it holds"),
    "Checkpointer.save: a step below 0": (
        lambda: given.checkpointer().save(-1, {}, metadata={}),
        "step -1",
        "int(state.step)",
    ),
    "Checkpointer.save: a word as state": (
        lambda: given.checkpointer().save(4, "state", metadata={}),
        "a str",
        "only arrays and numbers",
    ),
    "Checkpointer.save: no state": (lambda: given.checkpointer().save(4, {}, metadata={}), "an empty dict", "state"),
    "Checkpointer.save: swapped": (
        lambda: given.checkpointer().save({"w": X}, 4, metadata={}),
        "step a dict of 'w'",
        "int(state.step)",
    ),
    "Checkpointer.save: metadata": (
        lambda: given.checkpointer().save(4, {"w": X}, metadata=[1]),
        "metadata of a checkpoint is a list",
        "use a dict",
    ),
    "Checkpointer.save: metadata that is no JSON": (
        lambda: given.checkpointer().save(4, {"w": X}, metadata={"x": X}),
        "metadata",
        "JSON",
    ),
    "Checkpointer.add_eval_loss: a word": (
        lambda: given.checkpointer().add_eval_loss(3, "low"),
        "a str",
        "use a number",
    ),
    "Checkpointer.add_eval_loss: no such step": (
        lambda: given.checkpointer().add_eval_loss(9, 1.0),
        "step 9",
        "it holds",
    ),
    "Checkpointer.score_again: a list": (
        lambda: given.checkpointer().score_again([0.5]),
        "a list",
        "score_again({100: 0.5})",
    ),
    "Checkpointer.score_again: a word": (lambda: given.checkpointer().score_again({3: "low"}), "a str", "use a number"),
    "Checkpointer.restore: no arrays": (lambda: given.checkpointer().restore({"w": "x"}), "a str", "only arrays"),
    "Checkpointer.restore: nothing": (lambda: given.checkpointer().restore(None), "None", "step.abstract_state"),
    "Checkpointer.restore: other arrays": (
        lambda: given.checkpointer().restore({"v": jax.ShapeDtypeStruct((4,), np.float32)}),
        "v is not there",
        "of another",
    ),
    "Checkpointer.restore: the step first": (lambda: given.checkpointer().restore(3), "not 3", "step.abstract_state"),
    "Checkpointer.restore: no such step": (
        lambda: given.checkpointer().restore(TARGET, step=9),
        "step 9",
        "it holds",
    ),
    "Checkpointer.restore: prefix": (
        lambda: given.checkpointer().restore(TARGET, prefix=3),
        "not 3",
        "prefix='params'",
    ),
    "Checkpointer.check_like: a word": (lambda: given.checkpointer().check_like("x"), "a str", "only arrays"),
    "Checkpointer.verify: no such step": (lambda: given.checkpointer().verify(9), "step 9", "it holds"),
    "Config: an unknown key": (lambda: jt.Config(trian={"steps": 3}), "no key 'trian'", "write load_config("),
    "Config: a wrong value": (lambda: jt.Config(train={"steps": "many"}), "train.steps is 'many'", "a valid integer"),
    "Data: an array as rows": (
        lambda: dataclasses.replace(given.data(), train=X),
        "'ndarray' object",
        "jaxtrain.ArrayRows",
    ),
    "Data: a validation that is no rows": (
        lambda: dataclasses.replace(given.data(), validation={"inputs": X}),
        "a dict of inputs",
        "ArrayRows",
    ),
    "Data: a name as fingerprint": (
        lambda: dataclasses.replace(given.data(), fingerprint="mine"),
        "not 'mine'",
        "{'name': 'mine'}",
    ),
    "Data: another unit": (
        lambda: dataclasses.replace(given.data(), unit="rows"),
        "not 'rows'",
        "unit='examples'",
    ),
    "JsonlWriter: a number": (lambda: jt.JsonlWriter(3), "not 3", "'runs/mine'"),
    "JsonlWriter.scalars: a step of words": (
        lambda: given.writer().scalars("a", {"loss": 1.0}),
        "not 'a'",
        "int(state.step)",
    ),
    "JsonlWriter.scalars: swapped": (
        lambda: given.writer().scalars({"loss": 1.0}, 3),
        "a dict of 'loss'",
        "int(state.step)",
    ),
    "JsonlWriter.scalars: a number": (lambda: given.writer().scalars(1, 0.5), "not 0.5", "{'loss': "),
    "JsonlWriter.scalars: a vector": (
        lambda: given.writer().scalars(1, {"loss": NUMBERS}),
        "an array int64[4]",
        "float(",
    ),
    "JsonlWriter.text: a step of words": (lambda: given.writer().text("a", "b", "c"), "not 'a'", "int(state.step)"),
    "JsonlWriter.text: no text": (lambda: given.writer().text(1, "sample", 3), "not 3", "text(1, 'sample', "),
    "JsonlWriter.truncate_after: a word": (lambda: given.writer().truncate_after("a"), "not 'a'", "int(state.step)"),
    "load_config: a number": (lambda: jt.load_config(3), "not 3", "load_config('quickstart')"),
    "load_config: no such config": (lambda: jt.load_config("quikstart"), "'quikstart'", "did you mean 'quickstart'"),
    "load_config: one override": (
        lambda: jt.load_config("quickstart", overrides="train.steps=3"),
        "not 'train.steps=3'",
        "overrides=['train.steps=3']",
    ),
    "load_config: a dict of overrides": (
        lambda: jt.load_config("quickstart", overrides={"train.steps": 3}),
        "a dict of 'train.steps'",
        "keywords=",
    ),
    "load_config: numbers as overrides": (
        lambda: jt.load_config("quickstart", overrides=[3]),
        "not 3",
        "'train.steps=100'",
    ),
    "load_config: a list of keywords": (
        lambda: jt.load_config("quickstart", keywords=["train.steps=3"]),
        "a list of 1",
        "keywords={'train.steps': 100}",
    ),
    "load_config: a wrong value": (
        lambda: jt.load_config({"train": {"steps": "many"}}),
        "train.steps is 'many'",
        "it takes int",
    ),
    "open_data: a word": (lambda: jt.open_data("digits"), "not 'digits'", "open_data({'kind': 'digits'})"),
    "open_data: a number": (lambda: jt.open_data(3), "not 3", "open_data({'kind': 'digits'})"),
    "open_data: no kind": (lambda: jt.open_data({}), "an empty dict", "{'kind': 'digits'}"),
    "open_data: an unknown kind": (lambda: jt.open_data({"kind": "digit"}), "'digit'", "did you mean 'digits'"),
    "open_data: an array": (lambda: jt.open_data(X), "an array float32[8, 4]", "jaxtrain.ArrayRows"),
    "open_data: rows of words": (
        lambda: jt.open_data({"kind": "synthetic"}, sequence_length="a"),
        "not 'a'",
        "sequence_length=256",
    ),
    "open_data: a seed of words": (
        lambda: jt.open_data({"kind": "digits"}, seed="a"),
        "not 'a'",
        "seed=0",
    ),
    "open_data: another task": (
        lambda: jt.open_data({"kind": "digits"}, task="classify"),
        "not 'classify'",
        "task='classification'",
    ),
    "open_data: a reading of words": (
        lambda: jt.open_data({"kind": "digits"}, reading="x"),
        "not 'x'",
        "reading=data.reading",
    ),
    "open_data: chats of another template": (
        lambda: jt.open_data({"kind": "chat", "template": "chatnl"}, sequence_length=64),
        "data.template=chatnl",
        "chatml or plain",
    ),
    "open_data: chats without a file": (
        lambda: jt.open_data({"kind": "chat", "path": "chats.jsonl"}, sequence_length=64),
        "data.path chats.jsonl",
        "the nearest existing path",
    ),
    "open_data: chats of a number": (
        lambda: jt.open_data({"kind": "chat", "path": 3}, sequence_length=64),
        "data.path is 3",
        "text",
    ),
    "prefetch: batches": (lambda: jt.prefetch(given.batches(), 0, 1), "a Batches", "step.loader(batches)"),
    "prefetch: a number": (lambda: jt.prefetch(3, 0, 1), "not 3", "step.loader(batches)"),
    "prefetch: a start of words": (lambda: jt.prefetch(print, "a", 1), "not 'a'", "prefetch(load, 0, 100)"),
    "prefetch: below 0": (lambda: jt.prefetch(print, -1, 1), "not -1", "prefetch(load, 0, 100)"),
    "prefetch: no stop": (lambda: jt.prefetch(print, 0, None), "not None", "prefetch(load, 0, 100)"),
    "prefetch: a depth below 0": (lambda: jt.prefetch(print, 0, 1, depth=-1), "not -1", "depth=2"),
}
