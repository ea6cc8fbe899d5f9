"""Runs on pairs: what they compare with is computed once, kept, and found again, whatever happens to the run."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxtrain as jt

L, V = 6, 11


def pairs(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, V, (rows, 2, L + 1)).astype(np.int32)
    weights = np.ones((rows, 2, L), np.float32)
    weights[..., :2] = 0
    return {"inputs": tokens[..., :-1], "targets": tokens[..., 1:], "weights": weights}


DATA, HELD_OUT = pairs(12), pairs(5, seed=1)


def bigrams() -> jt.Model:
    """Logits of the next token from a table, which compiles at once."""
    return jt.from_functions(
        lambda key: {"table": jax.random.normal(key, (V, V))}, lambda params, x: params["table"][x], name="bigrams"
    )


def fit(folder, *, steps=4, task=None, devices=1, data=DATA, **more):
    mesh = jt.make_mesh(data=devices, devices=jax.devices()[:devices])
    options = {"validation": HELD_OUT, "logging": {"report": False}, "checkpoint": {"every": 2}, **more}
    return jt.fit(
        bigrams(),
        task or jt.dpo(),
        optax.adam(0.1),
        data=data,
        steps=steps,
        batch_size=4,
        mesh=mesh,
        run_dir=folder,
        **options,
    )


def table(result) -> np.ndarray:
    return np.asarray(result.state.params["table"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four steps that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, fit(folder)


@pytest.fixture
def half(whole, tmp_path):
    """The same after two steps."""
    folder = tmp_path / "half"
    shutil.copytree(whole[0], folder)
    shutil.rmtree(folder / "checkpoints" / "4")
    return folder


def losses(folder) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def test_the_first_loss_is_ln_2_and_the_file_is_by_row(whole):
    folder, result = whole
    assert abs(losses(folder)[0] - np.log(2)) < 1e-6
    with np.load(folder / "reference.npz") as kept:
        train, validation = kept["train"], kept["validation"]
    start = bigrams().init(jax.random.split(jax.random.key(0))[0])[0]["table"]
    logs = jax.nn.log_softmax(start)
    for data, values in ((DATA, train), (HELD_OUT, validation)):
        wanted = np.sum(np.asarray(logs)[data["inputs"], data["targets"]] * data["weights"], axis=-1)
        np.testing.assert_allclose(values, wanted, rtol=1e-5)
    assert result.metrics["eval_loss"] == pytest.approx(
        jt.open_run(folder, model=bigrams()).evaluate(jt.ArrayRows(HELD_OUT))["eval_loss"]
    )


def test_a_row_of_the_model_is_one_answer_of_a_pair(whole):
    """Two rows have the shape of one pair."""
    run = jt.open_run(whole[0], model=bigrams())
    np.testing.assert_array_equal(run.predict(DATA["inputs"][:2, 0]), table(whole[1])[DATA["inputs"][:2, 0]])


def test_a_resumed_run_reads_the_file_and_equals_the_whole_one_bit_for_bit(whole, half):
    kept = (half / "reference.npz").read_bytes()
    result = fit(half)
    assert (half / "reference.npz").read_bytes() == kept
    np.testing.assert_array_equal(table(result), table(whole[1]))


def test_a_lost_file_is_computed_again_from_the_same_start(whole, half, capsys):
    kept = (half / "reference.npz").read_bytes()
    (half / "reference.npz").unlink()
    np.testing.assert_array_equal(table(fit(half)), table(whole[1]))
    assert (half / "reference.npz").read_bytes() == kept
    assert "computed again" in capsys.readouterr().err


def test_another_mesh_reads_the_numbers_of_the_first(whole, half):
    result = fit(half, devices=2)
    np.testing.assert_allclose(table(result), table(whole[1]), rtol=1e-5, atol=1e-6)  # sums in another order


def test_a_lost_file_of_a_lost_start_is_one_line(whole, tmp_path):
    start, folder = tmp_path / "start", tmp_path / "run"
    shutil.copytree(whole[0], start)
    fit(folder, steps=2, params=str(start))
    shutil.rmtree(start)
    (folder / "reference.npz").unlink()
    with pytest.raises(jt.CheckpointError, match=r"reference\.npz is missing.* put the file back") as caught:
        fit(folder, params=str(start))
    assert "\n" not in str(caught.value)


def spoil(path):
    """Change one number and leave the file readable."""
    with np.load(path) as kept:
        arrays = dict(kept)
    arrays["train"][3, 1] += 1
    np.savez(path, **arrays)


DAMAGE = {
    "a number": (spoil, "is damaged: its numbers are not what was written; delete it"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:100]), "cannot be read"),
    "empty": (lambda path: path.write_bytes(b""), "cannot be read"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_file_is_one_line(case, half):
    damage, words = DAMAGE[case]
    damage(half / "reference.npz")
    with pytest.raises(jt.CheckpointError, match=words) as caught:
        fit(half)
    assert "\n" not in str(caught.value)


def test_the_file_of_another_run_is_one_line(half, tmp_path):
    fit(tmp_path / "other", data=pairs(12, seed=5))
    shutil.copy(tmp_path / "other" / "reference.npz", half / "reference.npz")
    with pytest.raises(jt.CheckpointError, match="other rows than the checkpoint was trained with"):
        fit(half)


def test_other_rows_need_a_reference_of_their_own(whole):
    run = jt.open_run(whole[0], model=bigrams())
    with pytest.raises(jt.DataError, match="give rows with an entry 'reference'"):
        run.evaluate(jt.ArrayRows(pairs(3, seed=7)))
    own = {**pairs(3, seed=7), "reference": np.full((3, 2), -9.0, np.float32)}
    assert np.isfinite(run.evaluate(jt.ArrayRows(own))["eval_loss"])


def swapped(number: int) -> dict[str, np.ndarray]:
    """The held-out pairs of `many`, the answers of one exchanged."""
    found = {name: column.copy() for name, column in MANY.items()}
    for column in found.values():
        column[number] = column[number][::-1]
    return found


MANY = pairs(150, seed=2)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many") / "run"
    fit(folder, steps=1, validation=MANY)
    return folder


def test_one_held_out_row_that_was_changed_is_named(many):
    run = jt.open_run(many, model=bigrams())
    with pytest.raises(
        jt.DataError, match=r"no numbers of row 1 of the 150 rows given; evaluate held-out rows"
    ) as caught:
        run.evaluate(jt.ArrayRows(swapped(1)))
    assert "\n" not in str(caught.value)
    with pytest.raises(jt.DataError, match=r"no numbers of row 0 and 149 others of the 150 rows given"):
        run.evaluate(jt.ArrayRows(pairs(150, seed=9)))


@pytest.mark.parametrize("read", ["at once", "one by one"])
def test_some_held_out_rows_have_their_numbers_in_any_order(many, read):
    run = jt.open_run(many, model=bigrams())
    chosen = np.random.default_rng(0).permutation(150)[:40]
    with np.load(many / "reference.npz") as kept:
        numbers = kept["validation"][chosen]
    some = {name: column[chosen] for name, column in MANY.items()}
    rows = jt.ArrayRows(some)
    found = run.evaluate(rows if read == "at once" else rows.map(dict))
    assert found == run.evaluate(jt.ArrayRows({**some, "reference": numbers}))


def test_what_an_evaluation_says_of_a_lost_or_damaged_file_helps(whole, half):
    """The line says to delete the file and to train again, which brings it back, also where the run has ended."""
    fit(half)
    path = half / "reference.npz"
    path.write_bytes(path.read_bytes()[:100])
    for words in ("cannot be read .* delete it and give the training command", "is missing; give the training command"):
        with pytest.raises(jt.CheckpointError, match=words) as caught:
            jt.open_run(half, model=bigrams()).evaluate(jt.ArrayRows(HELD_OUT))
        assert "\n" not in str(caught.value)
        path.unlink(missing_ok=True)
    result = fit(half)
    found = jt.open_run(half, model=bigrams()).evaluate(jt.ArrayRows(HELD_OUT))
    assert found["eval_loss"] == pytest.approx(whole[1].metrics["eval_loss"]) == result.metrics["eval_loss"]


def test_rows_that_bring_their_reference_keep_it(tmp_path):
    reference = np.random.default_rng(3).normal(-9, 1, (12, 2)).astype(np.float32)
    fit(tmp_path / "run", data={**DATA, "reference": reference}, validation=None, steps=1)
    assert not (tmp_path / "run" / "reference.npz").exists()
    assert abs(losses(tmp_path / "run")[0] - np.log(2)) > 1e-3


def ipo(apply, batch, key):
    ratios = jt.answer_log_probabilities(apply, batch) - batch["reference"]
    return jnp.square(ratios[:, 0] - ratios[:, 1] - 5.0), {}


def test_a_loss_of_ones_own_may_ask_for_a_reference(tmp_path):
    task = jt.Task.calling("ipo", ipo, reference=jt.answer_log_probabilities)
    fit(tmp_path / "run", task=task, steps=1)
    assert losses(tmp_path / "run")[0] == pytest.approx(25, rel=1e-6)


def test_another_beta_from_python_is_asked_for_again(tmp_path):
    fit(tmp_path / "run", task=jt.dpo(0.5), steps=1)
    with pytest.raises(jt.ConfigError, match="was trained with task"):
        jt.open_run(tmp_path / "run", model=bigrams()).evaluate(jt.ArrayRows(HELD_OUT))


WRONG = {
    "an iterable": (lambda: iter([pairs(4)]), jt.ConfigError, "an iterable of batches has no rows to return to"),
    "no pairs": (
        lambda: {key: column[:, 0] for key, column in DATA.items()},
        jt.ConfigError,
        "takes pairs of answers",
    ),
    "no finite number": (lambda: {**DATA, "targets": DATA["targets"] + V}, jt.DataError, "no finite number"),
}


@pytest.mark.parametrize("case", WRONG)
def test_rows_that_are_no_pairs_are_one_line(case, tmp_path):
    data, kind, words = WRONG[case]
    with pytest.raises(kind, match=words) as caught:
        fit(tmp_path / "run", data=data(), validation=None)
    assert "\n" not in str(caught.value)
