"""`jaxtrain eval --tasks`: tasks of lm-eval-harness, asked of a run from local files.

The package lm-eval is the extra `harness`, which is not in `dev`; what needs it says so where it is left out. What it
asks of a model is tested in tests/inference/test_harness.py.
"""

import importlib.util
import json

import pytest

import jaxtrain as jt
from jaxtrain.inference.likelihood import LikelihoodScorer

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


THINGS = [f"thing number {i}" for i in range(5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, text_run):
    """Two task files over one file of documents, and what the run says to them without the harness."""
    folder = tmp_path_factory.mktemp("tasks")
    run = jt.open_run(text_run)
    scorer = LikelihoodScorer(run.sharded_model)
    documents = []
    num_right = 0
    for i, thing in enumerate(THINGS):
        context = f"The {thing} is"
        # Three of five answers are those that the run gives.
        text = run.sample(context, new_tokens=4, temperature=0).removeprefix(context).split(".")[0]
        documents.append({"thing": thing, "answer": i % 3, "said": text if i < 3 else "-"})
        pairs = [([*context.encode()], [*f" {choice}".encode()]) for choice in ("red", "green", "blue")]
        scores = [score for score, _ in scorer(run.params, run.model_state, pairs)]
        num_right += scores.index(max(scores)) == i % 3
    (folder / "colours.jsonl").write_text("".join(f"{json.dumps(document)}\n" for document in documents))
    for name, text in (("colours", COLOURS), ("words", WORDS)):
        (folder / f"{name}.yaml").write_text(text.format(folder=folder))
    return folder, {"colours": num_right / 5, "words": 0.6}


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
