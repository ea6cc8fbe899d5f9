"""An engine that fails in the middle of a prompt is said to the client, whatever of the prompt was scored."""

import pytest
from scripted import ScriptedEngine, service
from starlette.testclient import TestClient

from jaxtrain.inference.engine.ticket import Ticket
from jaxtrain.inference.server.app import build_app


class _Failing(ScriptedEngine):
    """Fails before the second token of a prompt has its log-probability."""

    def submit(self, request, on_event=None):
        ticket = Ticket(request, on_event)
        ticket.prompt_log_probabilities = [None]
        ticket.finish("failed", "the device is gone")
        return ticket


@pytest.mark.parametrize(("stream", "status"), [(False, 500), (True, 200)], ids=["whole", "streamed"])
def test_the_failure_is_what_is_answered(stream, status):
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 1, "echo": True, "logprobs": 1, "stream": stream}
    answer = TestClient(build_app(service(_Failing())), "http://localhost").post("/v1/completions", json=body)
    assert answer.status_code == status
    assert "the device is gone" in answer.text
    assert "[DONE]" not in answer.text
