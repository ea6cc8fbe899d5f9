"""A keyword as another library spells it: the error says what to write here."""

import inspect
import pickle

import pytest

import jaxtrain as jt

CALLS = {
    "validation_split": (lambda: jt.fit(None, None, None, data=0, validation_split=0.1), "write validation=0.1"),
    "validation_data": (lambda: jt.fit(None, None, None, data=0, validation_data=0), "write validation=..."),
    "lr": (lambda: jt.fit(None, None, None, data=0, lr=1e-3), "write optimizer=optax.adamw(1e-3, weight_decay=0.01)"),
    "verbose": (lambda: jt.fit(None, None, None, data=0, verbose=1), 'write logging={"every": 100}'),
    "early_stopping": (
        lambda: jt.fit(None, None, None, data=0, early_stopping=3),
        "write callbacks=[jt.Early",
    ),
    "num_epochs": (lambda: jt.fit(None, None, None, data=0, num_epochs=3), "write epochs=..."),
    "batch": (lambda: jt.fit(None, None, None, data=0, batch=3), "write batch_size=..."),
    "a slip": (lambda: jt.make_train_step(None, None, None, acumulation_steps=3), "did you mean 'accumulation_steps'?"),
    "a class": (lambda: jt.EarlyStopping(monitor="eval_loss"), "write metric=..."),
    "nothing near": (lambda: jt.is_main_process(zzz=1), "is_main_process has no argument 'zzz'"),
}


@pytest.mark.parametrize("case", CALLS)
def test_an_unknown_keyword_says_what_is_meant(case):
    call, hint = CALLS[case]
    with pytest.raises(TypeError) as caught:
        call()
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_signature_and_type_stay():
    assert "validation" in inspect.signature(jt.fit).parameters
    assert isinstance(jt.EarlyStopping("eval_f1", patience=2), jt.EarlyStopping)
    with pytest.raises(TypeError, match="missing 1 required"):
        jt.fit(None, None, None, steps=3)


def test_public_functions_can_be_pickled():
    assert pickle.loads(pickle.dumps(jt.classification)) is jt.classification
