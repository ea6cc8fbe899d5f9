"""What lm-eval-harness asks of a model. The package lm-eval is the extra `harness`, which is not in `dev`."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install '.[harness]'")

import jax
from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]

import jaxtrain as jt
from jaxtrain.data.chat.templates import BUILT_IN
from jaxtrain.data.tokenizer import ByteTokenizer
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.inference.harness import HarnessModel, read_generation
from jaxtrain.inference.likelihood import LikelihoodScorer

LENGTH = 24
GROUP = {
    "kind": "transformer", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_sequence_length": LENGTH,
    "vocab_size": 256,
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(
    scope="module", params=[pytest.param(1, id="one device"), pytest.param(4, id="data=4", marks=pytest.mark.long)]
)
def opened(request, tmp_path_factory):
    """A published folder of a small transformer over bytes."""
    params, _ = jax.jit(jt.build_model(GROUP, input_shape=(LENGTH,)).init)(jax.random.key(3))
    folder = jt.save_pretrained(tmp_path_factory.mktemp("harness") / "tiny", params, model=GROUP)
    ByteTokenizer().save(folder / "tokenizer.json")
    return jt.open_model(folder, mesh=jt.make_mesh(devices=jax.devices()[: request.param]))


@pytest.fixture(scope="module")
def model(opened):
    return HarnessModel(opened)


def requests(kind, *arguments):
    return [Instance(kind, {}, one, i, metadata=("t", i, 1)) for i, one in enumerate(arguments)]


PAIRS = {
    ("To be or", " not"): (b"To be or", b" not"),
    ("To be  ", "or"): (b"To be", b"  or"),  # spaces go to the continuation
    ("", "not"): (b"\n", b"not"),
    (" ", "not"): (b"\n", b" not"),
}


def test_log_likelihoods_are_those_of_the_ids(opened, model):
    scores = model.loglikelihood(requests("loglikelihood", *PAIRS), disable_tqdm=True)
    pairs = [([*context], [*continuation]) for context, continuation in PAIRS.values()]
    assert scores == LikelihoodScorer(opened.sharded_model)(opened.params, {}, pairs)
    with pytest.raises(DataError, match="a continuation of 0 tokens"):
        model.loglikelihood(requests("loglikelihood", ("a context", "")), disable_tqdm=True)


def test_a_text_is_the_sum_of_its_windows(opened, model):
    texts = ["abcdefghijklmnopqrstuvwxyz"[:1], "ab" * (LENGTH // 2), "abc" * LENGTH]
    totals = model.loglikelihood_rolling(requests("loglikelihood_rolling", *[(text,) for text in texts]))
    scorer = LikelihoodScorer(opened.sharded_model)
    for text, total in zip(texts, totals, strict=True):
        row = [ord("\n"), *text.encode()]
        # Each window is as long as the model, and begins with the last token before it.
        windows = [
            (row[start : start + 1], row[start + 1 : start + 1 + LENGTH]) for start in range(0, len(text), LENGTH)
        ]
        assert total == pytest.approx(sum(score for score, _ in scorer(opened.params, {}, windows)), rel=1e-6)


def test_answers_end_before_the_first_stop_and_batches_do_not_matter(opened, model):
    contexts = [f"question {i}{'?' * (i % 3)}" for i in range(8)]

    def answer(contexts, asked=model, **settings):
        return asked.generate_until(
            requests("generate_until", *[(text, {"max_gen_toks": 5} | settings) for text in contexts])
        )

    plain = answer(contexts)
    assert plain[:2] == [answer([context])[0] for context in contexts[:2]]
    assert plain == answer(contexts, HarnessModel(opened, batch_size=3))
    sampled = answer(contexts, temperature=1.0)
    assert sampled == answer(contexts, HarnessModel(opened, batch_size=3), temperature=1.0) != plain
    stops = sorted({text[2] for text in plain if len(text) > 2})[:2]
    assert answer(contexts, until=stops) == [min((text.split(stop)[0] for stop in stops), key=len) for text in plain]
    # A long context loses its beginning; settings of one context leave the others alone.
    long = ("a" * 40, {"max_gen_toks": 5})
    mixed = model.generate_until(requests("generate_until", long, (contexts[0], {"max_gen_toks": 5, "until": "x"})))
    assert mixed[0] == answer(["a" * (LENGTH - 5)])[0]
    with pytest.raises(ConfigError, match="generation_kwargs of a task: num_beams is not supported"):
        answer(contexts, num_beams=4)


def test_settings_of_tasks():
    writing = read_generation({"until": "\n", "max_tokens": 3})
    assert (writing.stop, writing.new_tokens, writing.sampling) == (["\n"], 3, jt.Sampling(0.0))
    assert read_generation({}).new_tokens == 256
    assert read_generation({"do_sample": True}).sampling == jt.Sampling(1.0)
    assert read_generation({"do_sample": False, "temperature": 0.7}).sampling == jt.Sampling(0.0)
    settings = {"temperature": 0.7, "top_k": 0, "top_p": 0.9}
    assert read_generation(settings).sampling == jt.Sampling(0.7, None, 0.9)


def test_a_first_token_is_put_before_contexts_once(tmp_path):
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "?": 4}, unk_token="?"))
    words.add_special_tokens(["<s>", "</s>"])
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    params, _ = jt.build_model(GROUP, input_shape=(LENGTH,)).init(jax.random.key(0))
    folder = jt.save_pretrained(tmp_path / "words", params, model=GROUP)
    words.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(BUILT_IN["plain"])
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    opened = jt.open_model(folder)
    model = HarnessModel(opened)
    assert model.eot_token_id == 0
    assert model.tok_encode("a b") == [0, 2, 3]
    assert model.tok_encode("a b", add_special_tokens=False) == [2, 3]
    # In chats, special tokens that the template writes are read, and its own first token is not doubled.
    chats = HarnessModel(opened, chat=True)
    assert (chats.tok_encode("<s> a </s>"), chats.tok_encode("a")) == ([0, 2, 1], [0, 2])
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert chats.apply_chat_template(history) == "ab</s>"
    assert chats.apply_chat_template(history, add_generation_prompt=False) == "ab"
