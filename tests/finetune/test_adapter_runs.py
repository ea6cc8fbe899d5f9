"""Runs that train adapters: what their checkpoints hold, where their base comes from, and what is refused about it."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxtrain as jt
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.models.model import parameter_shapes

MODEL: dict[str, Any] = dict(
    num_layers=1, embed_dim=32, num_heads=2, num_kv_heads=1, mlp_dim=64, max_sequence_length=32, vocab_size=256
)
CONFIG: dict[str, Any] = {
    "model": {"kind": "transformer", **MODEL},
    "data": dict(kind="text", tokenizer=dict(kind="byte")),
    "finetune": dict(lora=dict(rank=4, targets=["query", "value", "down"], dropout=0.1)),
    # A schedule would depend on the number of steps, and each number would compile a step of its own.
    "optimizer": dict(learning_rate=1e-2, schedule=dict(kind="constant"), ema_decay=0.9),
    "train": dict(steps=4, global_batch_size=8),
    "evaluation": dict(max_batches=1),
    "checkpoint": dict(every=None),
    "parallel": dict(data=2, fsdp=4),
    "logging": dict(every=1, tensorboard=False, report=False),
}


def train(run_dir: Path, config: dict[str, Any] | None = None, **overrides: Any) -> jt.Result:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return jt.run_config(config or CONFIG, run_dir=run_dir, resume="auto", overrides=dotted, emulate=None)


def host(tree: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def same(left: Any, right: Any) -> bool:
    left, right = host(left), host(right)
    return left.keys() == right.keys() and all(np.array_equal(left[path], right[path]) for path in left)


def losses(run_dir: Path) -> list[float]:
    found = jt.open_run(run_dir).history["loss"]
    return found[~np.isnan(found)].tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model."""
    model = jt.build_model({"kind": "transformer", **MODEL}, input_shape=(32,))
    params, _ = jax.jit(model.init)(jax.random.key(7))
    return jt.save_pretrained(
        tmp_path_factory.mktemp("published") / "model", params, model=MODEL | {"kind": "transformer"}
    )


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> tuple[Path, jt.Result]:
    """A run of four steps over a published model."""
    run_dir = tmp_path_factory.mktemp("runs") / "adapter"
    return run_dir, train(run_dir, CONFIG | {"model": {"from": str(folder)}})


@pytest.mark.long
def test_a_checkpoint_holds_what_is_trained_and_names_its_base(published: tuple[Path, jt.Result], folder: Path) -> None:
    run_dir, result = published
    with Checkpointer(run_dir / "checkpoints", read_only=True) as checkpointer:
        info = checkpointer.info(4)
    params = [name for name in info.leaves if name.startswith("params.")]
    assert params
    assert all(name.endswith(("lora_a", "lora_b")) for name in params)
    base = info.metadata["base"]
    assert (base["format"], base["path"]) == ("published", str(folder))
    run = jt.open_run(run_dir)
    assert run.info["base"] == base
    assert len(run.sample("def", new_tokens=4, temperature=0.0)) >= 4
    # Adapters, two moments and an average of them, and a few numbers; the state holds the base besides.
    trained = sum(leaf.size for leaf in jax.tree.leaves(result.state.ema))
    assert info.num_bytes < 4 * 4 * trained + 200


@pytest.mark.long
def test_a_run_that_stops_goes_on_bit_for_bit(published: tuple[Path, jt.Result], folder: Path, tmp_path: Path) -> None:
    run_dir, result = published
    config = CONFIG | {"model": {"from": str(folder)}}
    train(tmp_path / "stopped", config, train__steps=2)
    resumed = train(tmp_path / "stopped", config)
    assert losses(tmp_path / "stopped") == losses(run_dir)
    assert same(resumed.state.params, result.state.params)


def test_the_base_is_equal_bit_for_bit_and_read_by_whoever_opens_the_run(
    published: tuple[Path, jt.Result], folder: Path
) -> None:
    run_dir, result = published
    run = jt.open_run(run_dir)
    kernel = run.params["blocks"]["attention"]["query"]["kernel"]
    read = jt.load_pretrained(folder).params
    assert np.array_equal(kernel.base, read["blocks"]["attention"]["query"]["kernel"])
    assert np.array_equal(run.params["embedding"], read["embedding"])
    assert same(run.params, result.state.evaluation_params)
    assert run.evaluate()["eval_loss"] == pytest.approx(result.metrics["eval_loss"], rel=1e-6)


@pytest.mark.long
def test_a_base_that_is_gone_is_one_line(published: tuple[Path, jt.Result], folder: Path, tmp_path: Path) -> None:
    """Another base of the same shapes: test_adapters_kept_apart.py."""
    run_dir, _ = published
    aside = folder.rename(tmp_path / "aside")
    try:
        with pytest.raises(CheckpointError, match="is gone"):
            _ = jt.open_run(run_dir).params
        # Where it went may be said.
        assert jt.open_run(run_dir, overrides={"model.from": str(aside)}).params
    finally:
        aside.rename(folder)


@pytest.mark.parametrize("group", [CONFIG["model"], {"from": None, "size": "smollm2_135m"}], ids=["own size", "size"])
def test_adapters_beside_random_weights_are_one_line(group: dict[str, Any], tmp_path: Path) -> None:
    small = {"num_layers": 1, "embed_dim": 32, "num_heads": 2, "num_kv_heads": 1, "mlp_dim": 64}
    with pytest.raises(ConfigError, match=r"^finetune\.lora trains .* random ones; set model\.from .* leave"):
        train(tmp_path, CONFIG | {"model": group | small})


def model() -> jt.Model:
    return jt.build_model({"kind": "transformer", **MODEL}, input_shape=(32,))


def step_of(model: jt.Model, **options: Any) -> jt.TrainStep:
    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    return jt.make_train_step(model, jt.language_modeling(), optax.adam(1e-2), mesh=mesh, **options)


def test_a_step_starts_from_an_adapter_run_or_puts_adapters_on_a_tree(published: tuple[Path, jt.Result]) -> None:
    run_dir, result = published
    adapted = jt.adapt(model(), lora=jt.LoraConfig(rank=4, targets=("query", "value", "down")))
    step = step_of(adapted)
    assert same(step.init(0, jt.load_weights(step, run_dir)).params, result.state.evaluation_params)
    with pytest.raises(ConfigError, match=r"holds adapters of .* export .* --merge"):
        jt.load_weights(step_of(model()), run_dir)
    original, _ = jax.jit(model().init)(jax.random.key(3))
    state = step.init(0, jt.load_weights(step, original))
    kernel = state.params["blocks"]["mlp"]["down"]["kernel"]
    assert np.array_equal(kernel.base, original["blocks"]["mlp"]["down"]["kernel"])
    assert not np.any(kernel.lora_b)


ROWS = np.random.default_rng(0).integers(0, 256, (32, 33)).astype(np.int32)


def fit(run_dir: Path, base: str | None = None, **given: Any) -> jt.Result:
    mesh = jt.make_mesh(data=1, devices=jax.devices()[:1])
    options: dict[str, Any] = dict(data=(ROWS[:, :-1], ROWS[:, 1:]), steps=2, batch_size=8, mesh=mesh, **given)
    logging = {"report": False, "tensorboard": False}
    lora = {"lora": {"rank": 2, "targets": ["query"]}, "base": base}
    return jt.fit(
        model(), jt.language_modeling(), optax.adam(1e-2), finetune=lora, logging=logging, run_dir=run_dir, **options
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("start", "base"),
    [("drawn from the seed", "nf4"), ("a run", None), ("adapters", "nf4")],
)
def test_every_start_is_found_again(tmp_path: Path, start: str, base: str | None) -> None:
    tree, _ = jax.jit(model().init)(jax.random.key(5))
    given: dict[str, Any] = {}
    if start != "drawn from the seed":
        step = step_of(
            model()
            if start == "a run"
            else jt.adapt(model(), lora=jt.LoraConfig(rank=2, targets=("query",)), base=base)
        )
        with Checkpointer(tmp_path / "base" / "checkpoints") as checkpointer:
            state = step.init(0, jt.load_weights(step, tree))
            checkpointer.save(0, state, metadata={})
        given["params"] = tmp_path / "base"
        if start == "a run":  # what `fit` returned stands for its path
            given["params"] = jt.Result(tmp_path / "base", state, {}, 0)
    result = fit(tmp_path / "run", base, **given)
    opened = jt.open_run(tmp_path / "run", model=model())
    assert same(opened.params, result.state.params)
    assert same(fit(tmp_path / "run", base, **given).state.params, result.state.params)


@pytest.mark.long
def test_a_head_that_is_drawn_anew_is_trained_and_saved(tmp_path: Path) -> None:
    """In bf16, where what is frozen is stored in bf16 and what is trained in float32."""
    with Checkpointer(tmp_path / "base") as checkpointer:
        checkpointer.save(0, {"params": jax.jit(model().init)(jax.random.key(5))[0]}, metadata={})
    classifier = jt.build_model(
        {"kind": "transformer", **MODEL, "causal": False, "head": {"kind": "sequence", "num_labels": 4}},
        input_shape=(32,),
    )
    result = jt.fit(
        classifier,
        jt.classification(),
        optax.adam(1e-2),
        data=(ROWS[:, :-1], ROWS[:, 0] % 4),
        steps=2,
        batch_size=8,
        mesh=jt.make_mesh(data=1, devices=jax.devices()[:1]),
        policy="bf16",
        params=tmp_path / "base",
        skip=["head/*", "output"],
        finetune={"lora": {"rank": 2}},
        logging={"report": False, "tensorboard": False},
        run_dir=tmp_path / "run",
    )
    with Checkpointer(tmp_path / "run" / "checkpoints", read_only=True) as checkpointer:
        saved = {name for name in checkpointer.info(2).leaves if name.startswith("params.")}
    assert {name for name in saved if "lora" not in name} == {"params.head.output.bias", "params.head.output.kernel"}
    assert result.state.params["embedding"].dtype == np.dtype("bfloat16")
    assert same(jt.open_run(tmp_path / "run", model=classifier).params, result.state.params)


def test_gpt3_with_rank_4_on_query_and_value_trains_what_the_formula_counts() -> None:
    """96 layers, 2 kernels of 12,288 x 12,288, rank 4: 96 * 2 * 2 * 4 * 12,288 (Hu et al. 2021, section 1)."""
    gpt3 = dict(kind="transformer", num_layers=96, embed_dim=12288, num_heads=96, mlp_dim=49152, vocab_size=50257)
    big = jt.build_model(gpt3 | {"max_sequence_length": 2048}, input_shape=(2048,))
    adapted = jt.adapt(big, lora=jt.LoraConfig(rank=4, targets=("query", "value")))
    trained = [leaf.size for path, leaf in parameter_shapes(adapted).items() if path.endswith(("lora_a", "lora_b"))]
    assert sum(trained) == 18_874_368
