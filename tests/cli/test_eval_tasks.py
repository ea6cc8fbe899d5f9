"""`jaxtrain eval --tasks`: tasks of lm-eval-harness, asked of a run from local files.

The package lm-eval is the extra `harness`, which is not in `dev`; what needs it says so where it is left out. What it
asks of a model is tested without it in tests/inference/test_asked.py.
"""

import importlib.util
import json

import pytest

import jaxtrain as jt
from jaxtrain.inference.harness import AskedModel, task_tokens
from jaxtrain.inference.prompts import SpecialTokens

INSTALLED = importlib.util.find_spec("lm_eval") is not None


def needs_lm_eval(test):
    """Marks what runs where lm-eval is installed; its own warnings, and those of what it imports, are not ours."""
    reason = "lm-eval is not installed: pip install '.[harness]'"
    for mark in (pytest.mark.long, pytest.mark.skipif(not INSTALLED, reason=reason)):
        test = mark(test)
    return pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")(test)


COLOURS = """
task: colours
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {folder}/colours.jsonl}}}}
output_type: multiple_choice
validation_split: validation
fewshot_split: validation
doc_to_text: "The {{{{thing}}}} is"
doc_to_choice: [red, green, blue]
doc_to_target: answer
metric_list: [{{metric: acc}}]
metadata: {{version: 1.0}}
"""
WORDS = """
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {folder}/colours.jsonl}}}}
output_type: generate_until
validation_split: validation
doc_to_text: "The {{{{thing}}}} is"
doc_to_target: "{{{{said}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 4}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text_run):
    """Two task files over one file of documents, and what the run says to them without the harness."""
    folder = tmp_path_factory.mktemp("tasks")
    run = jt.open_run(text_run)
    asked = AskedModel(
        run.sharded_model, run.params, run.model_state, task_tokens(run.tokenizer, SpecialTokens(), None)
    )
    things = [f"thing number {i}" for i in range(5)]
    answers = asked.answer([(f"The {thing} is", {"until": ".", "max_gen_toks": 4}) for thing in things], task="words")
    # Three of five answers are those that the run gives.
    documents = [
        {"thing": thing, "answer": i % 3, "said": answers[i] if i < 3 else "-"} for i, thing in enumerate(things)
    ]
    (folder / "colours.jsonl").write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    for name, text in (("colours", COLOURS), ("words", WORDS)):
        (folder / f"{name}.yaml").write_text(text.format(folder=folder))
    pairs = [(f"The {thing} is", f" {choice}") for thing in things for choice in ("red", "green", "blue")]
    scores = [score for score, _ in asked.score_continuations(pairs)]
    best = [max(range(3), key=lambda k, i=i: scores[3 * i + k]) for i in range(5)]
    return folder, {"colours": sum(best[i] == i % 3 for i in range(5)) / 5, "words": 0.6}


@needs_lm_eval
def test_tasks_give_what_the_model_says(cli, text_run, folder):
    where, expected = folder
    tasks = ",".join(f"{where}/{name}.yaml" for name in expected)
    answer = cli("eval", str(text_run), "--tasks", tasks, "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert {row["task"]: row["value"] for row in found["tasks"]} == pytest.approx(expected, rel=1e-6)
    assert (found["step"], {row["rows"] for row in found["tasks"]}) == (4, {5})
    table = cli("eval", str(text_run), "--tasks", f"{where}/colours.yaml", "--limit", "2", "--shots", "1").out
    header, row = table.splitlines()
    names = ["task", "version", "filter", "shots", "metric", "value", "stderr", "rows", "higher_is_better"]
    assert header.split() == names
    assert (row.split()[:5], row.split()[-2]) == (["colours", "1", "none", "1", "acc"], "2")
