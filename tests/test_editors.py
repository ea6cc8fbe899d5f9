"""What an editor knows of the library: its names, signatures and types, read from jaxtrain/__init__.pyi."""

import json
import subprocess
import sys
from pathlib import Path

import jedi
import pytest

import jaxtrain

ROOT = Path(__file__).resolve().parent.parent
RIGHT = """
import jaxtrain as jt
import numpy as np
import optax
from flax import nnx

model = jt.from_nnx(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
rows = {"inputs": np.ones((8, 4), np.float32), "targets": np.arange(8) % 3}
result = jt.fit(model, "classification", optax.adamw(1e-3), data=rows, epochs=1)
step = jt.make_train_step(model, jt.classification(), optax.adamw(1e-3), mesh=jt.make_mesh(fsdp=1))
state, metrics = step(step.init(0), rows)
print(result.step, state.params, metrics["loss"])
"""
WRONG = """
import jaxtrain as jt

jt.fit(1, 2, 3, nonsense=4)
jt.no_such_name
jt.make_mesh(fsdp="eight")
"""


def read_by_jedi(code: str) -> jedi.Script:
    """Open code as IPython and editors with jedi do, in a project that has this checkout on its path."""
    return jedi.Script(code, project=jedi.Project(ROOT, added_sys_path=[str(ROOT)]))


def test_every_public_name_completes_and_fit_has_its_signature() -> None:
    names = {completion.name for completion in read_by_jedi("import jaxtrain as jt\njt.").complete(2, 3)}
    assert names >= set(jaxtrain.__all__)

    (signature,) = read_by_jedi("import jaxtrain as jt\njt.fit(").get_signatures(2, 7)
    assert [parameter.name for parameter in signature.params[:5]] == [
        "model",
        "task",
        "optimizer",
        "data",
        "validation",
    ]
    assert "Args:" in signature.docstring()


@pytest.mark.long
def test_pyright_accepts_a_right_program_and_refuses_wrong_calls_and_names(tmp_path) -> None:
    (tmp_path / "right.py").write_text(RIGHT, encoding="utf-8")
    (tmp_path / "wrong.py").write_text(WRONG, encoding="utf-8")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}), encoding="utf-8")
    command = ["-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300, check=False)

    errors = json.loads(done.stdout)["generalDiagnostics"]
    rules = {(Path(error["file"]).name, error["range"]["start"]["line"] + 1): error["rule"] for error in errors}
    assert rules == {
        ("wrong.py", 4): "reportCallIssue",
        ("wrong.py", 5): "reportAttributeAccessIssue",
        ("wrong.py", 6): "reportArgumentType",
    }, errors
