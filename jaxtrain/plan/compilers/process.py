"""Asks a process of its own about a step: plugins of hardware that is not here stay out of this one. No jax here."""

import json
import re
import subprocess
import sys
from typing import Any

# The line of a traceback that names what was raised.
_RAISED = re.compile(r"[\w.]*(Error|Exception)\b")


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """The answer of `subprocess_main` to a request; `error`, a line, where there is none."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxtrain.plan.compilers.subprocess_main"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        message = next((line for line in reversed(lines) if _RAISED.match(line)), lines[-1] if lines else "no message")
        return {"error": f"the compiler failed: {message[:300]}"}
    return json.loads(done.stdout.splitlines()[-1])
