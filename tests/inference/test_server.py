"""The server over HTTP with the real openai client, and what clients do wrong. The engine answers from a script."""

from typing import Any

import httpx
import openai
import pytest
from scripted import ScriptedEngine, service, serving
from starlette.testclient import TestClient

from jaxtrain.inference.server.app import build_app

HI: Any = [{"role": "user", "content": "Hi"}]
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def engine():
    return ScriptedEngine()


@pytest.fixture(scope="module")
def address(engine):
    with serving(service(engine)) as found:
        yield found


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_models_are_listed(client):
    assert [one.id for one in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.completions.create(model="other", prompt="a")


def test_completions_of_several_prompts(client):
    """The scripted model repeats its prompt."""
    found = client.completions.create(model="tiny", prompt=["ab", "xyz"], n=2, max_tokens=3)
    assert [(one.index, one.text, one.finish_reason) for one in found.choices] == [
        (0, "aba", "length"), (1, "aba", "length"), (2, "xyz", "length"), (3, "xyz", "length"),
    ]  # fmt: skip
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (5, 12, 17)
    assert found.choices[0].logprobs is None


def test_chat_answers_with_scores(client):
    found = client.chat.completions.create(
        model="tiny", messages=HI, max_completion_tokens=2, n=2, logprobs=True, top_logprobs=1
    )
    for index, one in enumerate(found.choices):
        assert (one.index, one.message.role, one.message.content) == (index, "assistant", "u")
        assert [(two.token, two.bytes, two.logprob) for two in one.logprobs.content] == [
            ("<|im_start|>", list(b"<|im_start|>"), -0.5), ("u", [117], -0.5),
        ]  # fmt: skip
        assert one.logprobs.content[1].top_logprobs[0].token == "u"


def test_a_stream_gives_what_the_whole_answer_has(client):
    asked: Any = {"model": "tiny", "prompt": "é🎉!", "max_tokens": 20, "seed": 1, "n": 2}
    whole = client.completions.create(**asked)
    texts, ended, usage = {0: "", 1: ""}, {}, None
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for one in chunk.choices:
            # A part of a character would be U+FFFD; the prompt has none, and the last character is cut by the limit.
            assert one.finish_reason is not None or "\ufffd" not in one.text
            texts[one.index] += one.text
            ended[one.index] = one.finish_reason
    assert texts == {one.index: one.text for one in whole.choices}
    assert ended == {0: "length", 1: "length"}
    assert usage == whole.usage


def test_a_streamed_chat_begins_with_the_role(client):
    chunks = list(client.chat.completions.create(model="tiny", messages=HI, max_tokens=3, stream=True))
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "us"


def test_a_stop_ends_the_answer_and_frees_the_slot(client, engine):
    found = client.completions.create(model="tiny", prompt="abcd", max_tokens=60, stop=["da"])
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("abc", "stop")
    list(engine.tickets[-1])
    assert engine.tickets[-1].finish_reason == "stop"


STATUSES = {
    "not JSON": ("POST", "/v1/completions", b"{", 400),
    "a missing field": ("POST", "/v1/completions", b"{}", 400),
    "another model": ("POST", "/v1/completions", b'{"model": "gpt", "prompt": "a"}', 404),
    "a body beyond the limit": ("POST", "/v1/completions", b'{"model": "%s"}' % (b"a" * 20_000), 413),
    "no embeddings here": ("POST", "/v1/embeddings", b'{"model": "tiny", "input": "a"}', 404),
    "an unknown path": ("GET", "/v2/models", b"", 404),
    "another method": ("GET", "/v1/completions", b"", 405),
}


@pytest.mark.parametrize(("method", "path", "body", "status"), STATUSES.values(), ids=STATUSES)
def test_what_is_wrong_has_its_status_and_an_error_object(address, method, path, body, status):
    answer = httpx.request(method, address + path, content=body, headers=JSON)
    error = answer.json()["error"]
    assert (answer.status_code, set(error)) == (status, {"message", "type", "param", "code"})
    assert "\n" not in error["message"]
    assert ("POST" in answer.headers.get("allow", "")) == (status == 405)


def test_health_and_metrics(address, client):
    client.completions.create(model="tiny", prompt="a", max_tokens=1)
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    lines = httpx.get(f"{address}/metrics").text.splitlines()
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
    assert values["jaxtrain_requests_total"] >= 1


def test_the_page_is_one_file(address):
    page = httpx.get(address)
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not [word for word in ("https://", "src=", "@import") if word in page.text]


def test_a_full_queue_says_when_to_come_again():
    slow = ScriptedEngine(seconds=0.05, most=2)
    with (
        serving(service(slow)) as address,
        httpx.stream("POST", f"{address}/v1/completions", json=_slow()) as running,
    ):
        lines = running.iter_lines()
        next(lines)  # it runs for as long as somebody reads it
        answer = httpx.post(f"{address}/v1/completions", json=_slow(n=2))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["type"] == "overloaded_error"
        # The first of the two, which had a place, gave it back.
        list(slow.tickets[1])
        assert slow.tickets[1].finish_reason == "cancelled"


def _slow(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "a", "max_tokens": 60, "stream": True, **fields}


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_frees_its_slots(stream):
    slow = ScriptedEngine(seconds=0.05)
    with serving(service(slow)) as address:
        body = _slow(stream=stream, n=3)
        if stream:
            with httpx.stream("POST", f"{address}/v1/completions", json=body) as running:
                next(running.iter_raw())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{address}/v1/completions", json=body, timeout=0.3)
        for ticket in slow.tickets:
            list(ticket)
        assert [ticket.finish_reason for ticket in slow.tickets] == ["cancelled"] * 3


def test_an_engine_that_fails_is_said_in_the_stream_and_by_a_status():
    failing = ScriptedEngine(lambda request: [97, -1])
    with (
        serving(service(failing)) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as one,
    ):
        with pytest.raises(openai.APIError, match="a step on its device failed"):
            list(one.completions.create(model="tiny", prompt="a", stream=True))
        with pytest.raises(openai.InternalServerError, match="a step on its device failed"):
            one.completions.create(model="tiny", prompt="a")
        failing.error = "the engine stopped"
        assert httpx.get(f"{address}/health").status_code == 503


def test_a_key_guards_all_but_health_and_the_page():
    with serving(service(ScriptedEngine(), api_key="s3cret")) as address:
        assert [httpx.get(address + path).status_code for path in ("/", "/health")] == [200, 200]
        for path in ("/v1/models", "/metrics"):
            answer = httpx.get(address + path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        with openai.OpenAI(base_url=f"{address}/v1", api_key="other", max_retries=0) as one:
            with pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
                one.models.list()
            assert one.with_options(api_key="s3cret").models.list().data[0].id == "tiny"


# Headers of a request to a server that is bound to the name "box", and its status without a key and with one.
SITES = {
    "a page of another site whose name begins as this machine": ({"host": "localhost.evil.example:8000"}, 400, 200),
    "another machine": ({"host": "192.168.1.5:8000"}, 400, 200),
    "localhost": ({"host": "localhost"}, 200, 200),
    "IPv6 with a port": ({"host": "[::1]:8000"}, 200, 200),
    "the name that it is bound to": ({"host": "box:8000"}, 200, 200),
    "a form": ({"host": "localhost", "content-type": "text/plain"}, 415, 415),
    "JSON of a charset": ({"host": "localhost", "content-type": "Application/JSON; charset=utf-8"}, 200, 200),
}


@pytest.mark.parametrize(("headers", "open_status", "key_status"), SITES.values(), ids=SITES)
def test_pages_of_other_sites_are_refused(headers, open_status, key_status):
    for key, status in ((None, open_status), ("s3cret", key_status)):
        engine = ScriptedEngine()
        client = TestClient(build_app(service(engine, api_key=key), host="Box"))
        given = {**JSON, **headers, "authorization": f"Bearer {key}"}
        answer = client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1}, headers=given)
        assert (answer.status_code, len(engine.tickets)) == (status, int(status == 200))
        assert client.get("/v1/models", headers=given).status_code == (200 if status == 415 else status)
