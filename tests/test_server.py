"""The server: what is refused is refused by name, a client that leaves holds nothing, and it starts
and stops as told.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import logging
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("zmq")

import uvicorn  # noqa: E402
from fastapi import APIRouter, FastAPI  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from speaker import make_speaker  # noqa: E402

from teachvllm import LLM, EngineArgs, SamplingParams  # noqa: E402
from teachvllm.engine.async_llm import AsyncLLM  # noqa: E402
from teachvllm.entrypoints.api_server import (  # noqa: E402
    Server,
    ServerArgs,
    TimedConnection,
    add_server_args,
    bind,
    build_app,
    run_server,
    serve_in_background,
)
from teachvllm.entrypoints.protocol import (  # noqa: E402
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from teachvllm.outputs import CompletionOutput, RequestOutput  # noqa: E402

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 512}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("speaker")
    make_speaker(folder, max_position_embeddings=2048)
    return str(folder)


def state_router(engine: AsyncLLM) -> APIRouter:
    router = APIRouter()

    @router.get("/state")
    async def state() -> dict:
        stats = await engine.engine_core.call_utility_async("get_stats")
        return {
            "used": stats.num_gpu_blocks_used,
            "requests": stats.num_running + stats.num_waiting,
            "tasks": len(asyncio.all_tasks()),
        }

    return router


@pytest.fixture(scope="module")
def engine(speaker: str) -> Iterator[AsyncLLM]:
    # for its sockets
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        engine = AsyncLLM.from_engine_args(EngineArgs(speaker, **OPTIONS))
        patch.undo()
        engine.folder = folder  # type: ignore[attr-defined]
        yield engine
        engine.shutdown()
        assert not os.listdir(folder)


@pytest.fixture(scope="module")
def url(engine: AsyncLLM) -> Iterator[str]:
    args = ServerArgs(
        port=0, served_model_name=["tiny", "other"], request_timeout=60, max_num_prompts=40
    )
    with serve_in_background(engine, args, routers=[state_router(engine)]) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with httpx.Client(base_url=url, timeout=200) as client:
        yield client


@pytest.fixture(scope="module")
def offline(speaker: str) -> dict[tuple[str, int], tuple[str, str]]:
    "Text and finish reason of greedy answers: by prompt and most tokens."
    asked = [(prompt_of(i), 4 + 7 * (i % 9)) for i in range(60)]
    with LLM(speaker, **OPTIONS) as llm:
        params = [SamplingParams(temperature=0, max_tokens=most) for _, most in asked]
        outputs = llm.generate([prompt for prompt, _ in asked], params, use_tqdm=False)
    return {key: (o.outputs[0].text, o.outputs[0].finish_reason) for key, o in zip(asked, outputs)}


def prompt_of(i: int) -> str:
    rng = random.Random(i)
    return " ".join(
        rng.choices(
            ["The", "capital", "of", "a", "river", "is", "deep", "and", "Two"], k=rng.randint(1, 40)
        )
    )


def settled(client: Any) -> dict:
    "The server's state, once nothing runs."
    for _ in range(200):
        state = client.get("/state").json()
        if not state["used"] and not state["requests"]:
            return state
        time.sleep(0.05)
    raise AssertionError(state)


def error_of(response: Any) -> dict:
    error = response.json()["error"]
    assert (
        set(error) == {"message", "type", "param", "code"} and error["code"] == response.status_code
    )
    return error


def events_of(response: Any) -> list[Any]:
    "The events of a stream that was read."
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


# Routes


def test_the_routes_about_the_server(client: Any) -> None:
    import teachvllm

    assert (
        client.get("/health").status_code
        == client.get("/ping").status_code
        == client.post("/ping").status_code
        == 200
    )
    assert client.get("/version").json() == {"version": teachvllm.__version__}
    models = client.get("/v1/models").json()["data"]
    assert [(m["id"], m["max_model_len"], m["object"]) for m in models] == [
        ("tiny", 2048, "model"),
        ("other", 2048, "model"),
    ]
    assert client.get("/v1/models/other").json()["id"] == "other"
    paths = client.get("/openapi.json").json()["paths"]
    assert {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/tokenize",
        "/detokenize",
    } <= set(paths)


def test_metrics_are_those_of_the_registry(engine: AsyncLLM, client: Any) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    prometheus.Gauge("teachvllm_answer", "of everything", registry=registry).set(42)
    status, text = ask_app(build_app(engine, registry=registry), "GET", "/metrics")
    assert status == 200 and "teachvllm_answer 42.0" in text
    assert client.get("/metrics").status_code == 404  # this server has none


def test_tokens_there_and_back(client: Any) -> None:
    told = client.post(
        "/tokenize", json={"prompt": "Hello there", "return_token_strs": True}
    ).json()
    assert (
        told["count"] == len(told["tokens"]) == len(told["token_strs"])
        and told["max_model_len"] == 2048
    )
    assert client.post("/detokenize", json={"tokens": told["tokens"]}).json() == {
        "prompt": "Hello there"
    }
    chat = client.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    usage = client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1}).json()[
        "usage"
    ]
    assert len(chat) == usage["prompt_tokens"]


# What is refused

COMPLETIONS = [
    ({}, "prompt", "required"),
    ({"prompt": 7}, "prompt", "string"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [True, False]}, "prompt", "integer"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": [10**9]}, "prompt", "vocabulary"),
    ({"prompt": [10**30]}, "prompt", "less than"),
    ({"prompt": ["a"] * 41}, "prompt", "--max-num-prompts"),
    ({"prompt": "a " * 3000}, "prompt", "2048"),
    ({"prompt": "Hello", "max_tokens": 2048}, "max_tokens", "2047 tokens that are left"),
    ({"prompt": "Hello", "max_tokens": -3}, "max_tokens", "-3"),
    ({"prompt": "Hello", "max_tokens": 0}, "max_tokens", "echo"),
    ({"prompt": "Hello", "max_tokens": 1.5}, "max_tokens", "integer"),
    ({"prompt": "Hello", "logprobs": 21}, "logprobs", "max_logprobs=20"),
    ({"prompt": "Hello", "prompt_logprobs": 2, "stream": True}, "prompt_logprobs", "stream"),
    (
        {"prompt": "Hello", "stream_options": {"include_usage": True}},
        "stream_options",
        "stream=true",
    ),
    ({"prompt": "Hello", "temperature": -1}, "temperature", "-1"),
    ({"prompt": "Hello", "seed": 2**63}, "seed", "less than"),
    ({"prompt": "Hello", "n": 300}, "n", "300 sequences"),
    ({"prompt": "Hello", "n": 10**12}, "n", "sequences"),
    ({"prompt": "Hello", "stop": [""]}, "stop", "empty"),
    ({"prompt": "Hello", "stop_token_ids": [10**6]}, "stop_token_ids", "vocabulary"),
    ({"prompt": "Hello", "logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    ({"prompt": "Hello", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "between"),
    ({"prompt": "Hello", "priority": 3}, "priority", "scheduling_policy"),
    ({"prompt": "Hello", "use_beam_search": True, "temperature": 0.5}, "temperature", "0.5"),
    ({"prompt": "Hello", "use_beam_search": True, "logprobs": 1}, "logprobs", "use_beam_search"),
    *(
        ({"prompt": "Hello", "use_beam_search": True, **one}, next(iter(one)), "use_beam_search")
        for one in (
            {"stop": "a"},
            {"stop_token_ids": [3]},
            {"bad_words": ["a"]},
            {"logit_bias": {"3": 1}},
            {"seed": 0},
            {"top_p": 0.5},
            {"top_k": 4},
            {"presence_penalty": 0.1},
            {"frequency_penalty": 0.1},
            {"repetition_penalty": 2},
        )
    ),
    ({"prompt": "Hello", "stop": ["a"] * 65}, "stop", "64"),
    ({"prompt": "Hello", "bad_words": ["a"] * 257}, "bad_words", "256"),
    ({"prompt": ["Hello"] * 40, "bad_words": ["a"] * 200}, "bad_words", "together"),
    ({"prompt": "Hello", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1024"),
    ({"prompt": "Hello", "stop_token_ids": [1] * 1025}, "stop_token_ids", "1024"),
    ({"prompt": "Hello", "allowed_token_ids": [1] * 16385}, "allowed_token_ids", "16384"),
    ({"prompt": "Hello", "structural_tag": "{}"}, "structural_tag", "structures: a list must"),
    (
        {"prompt": "Hello", "response_format": {"type": "structural_tag", "structures": []}},
        "response_format",
        "structures: a list must",
    ),
    (
        {"prompt": "Hello", "guided_json": {"const": 10**400, "minimum": 10**401}},
        "guided_json",
        "nothing fits",
    ),
    (
        {"prompt": "Hello", "guided_json": {}, "guided_decoding_backend": "x"},
        "guided_decoding_backend",
        "this engine has",
    ),
    (
        {"prompt": "Hello", "guided_json": {}, "guided_regex": "a"},
        "guided_json",
        "only use one kind",
    ),
    ({"prompt": "Hello", "guided_regex": "a["}, "guided_regex", "a["),
    ({"prompt": "Hello", "guided_grammar": "root ::= x"}, "guided_grammar", "there is no rule 'x'"),
    ({"prompt": "Hello", "guided_json": {"not": {}}}, "guided_json", "'not' is not served"),
    (
        {"prompt": "Hello", "structured_outputs": {"rege": "a"}},
        "structured_outputs",
        "did you mean `regex`",
    ),
    (
        {"prompt": "Hello", "guided_regex": "a", "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "said twice",
    ),
    (
        {"prompt": "Hello", "guided_regex": "a", "use_beam_search": True},
        "guided_regex",
        "use_beam_search",
    ),
    ({"prompt": "Hello", "cache_salt": ""}, "cache_salt", "at least 1"),
    ({"prompt": "Hello", "cache_salt": 7}, "cache_salt", "string"),
    ({"prompt": "Hello", "cache_salt": "a" * 1025}, "cache_salt", "1024"),
    ({"prompt": "Hello", "repetition_penalty": 1e-320}, "repetition_penalty", "from 1e-5"),
    (
        {
            "prompt": "Hello",
            "allowed_token_ids": [5],
            "min_tokens": 2,
            "stop_token_ids": [5],
        },
        "allowed_token_ids",
        "leave none of them",
    ),
    ({"prompt": "Hello", "return_token_ids": 7}, "return_token_ids", "boolean"),
    ({"prompt": "Hello", "suffix": "x"}, "suffix", "not inserted"),
    ({"prompt": "Hello", "lora_request": {"lora_path": "/etc/passwd"}}, "lora_request", "LoRA"),
    ({"prompt": "Hello", "logits_processors": ["os.system"]}, "logits_processors", "never run"),
    (
        {"prompt": "Hello", "response_format": {"type": "json_schema"}},
        "response_format",
        "needs json_schema",
    ),
    ({"prompt": "Hello", "response_format": {}}, "response_format", "type is required"),
    (
        {"prompt": "Hello", "response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format",
        "json_schema.name is required",
    ),
    (
        {"prompt": "Hello", "guided_regex": "a", "guided_decoding_backend": "outlines"},
        "guided_decoding_backend",
        "this engine has",
    ),
    ({"prompt": "Hello", "response_format": {"type": "xml"}}, "response_format", "json_object"),
]
IMAGE = [
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}
]
CHATS = [
    ({}, "messages", "required"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "user"}]}, "messages", "required"),
    ({"messages": [{"content": "a"}]}, "messages", "required"),
    ({"messages": [{"role": "user", "content": None}]}, "messages", "string"),
    ({"messages": IMAGE}, "messages", "image_url"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "no text"),
    ({"messages": [{"role": "user", "content": "a " * 3000}]}, "messages", "2048"),
    (
        {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools",
        "--enable-auto-tool-choice and --tool-call-parser",
    ),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "logprobs=true"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "max_logprobs=20"),
    (
        {"messages": HELLO, "max_completion_tokens": 2040},
        "max_completion_tokens",
        "tokens that are left",
    ),
    (
        {"messages": HELLO, "chat_template": "{{ 1 }}"},
        "chat_template",
        "--trust-request-chat-template",
    ),
    (
        {"messages": HELLO, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        "chat_template_kwargs",
        "no variable",
    ),
    (
        {"messages": HELLO, "chat_template_kwargs": {"tokenize": True}},
        "chat_template_kwargs",
        "no variable",
    ),
    (
        {"messages": HELLO, "chat_template_kwargs": {"tokenizer": 1}},
        "chat_template_kwargs",
        "no variable",
    ),
    (
        {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "both",
    ),
    ({"messages": HELLO, "modalities": ["audio"]}, "modalities", "text"),
]


@pytest.mark.parametrize("body, param, words", COMPLETIONS, ids=lambda value: str(value)[:60])
def test_completions_that_are_refused(client: Any, body: dict, param: str, words: str) -> None:
    response = client.post("/v1/completions", json=body)
    error = error_of(response)
    assert response.status_code == 400 and error["param"] == param and words in error["message"], (
        error
    )


@pytest.mark.parametrize("body, param, words", CHATS, ids=lambda value: str(value)[:60])
def test_chats_that_are_refused(client: Any, body: dict, param: str, words: str) -> None:
    response = client.post("/v1/chat/completions", json=body)
    error = error_of(response)
    assert response.status_code == 400 and error["param"] == param and words in error["message"], (
        error
    )


def test_what_is_refused_in_a_stream_has_a_status(client: Any) -> None:
    "Also where only the core knows that it can never run."
    for body in (
        {"prompt": "Hello", "n": 300},
        {"prompt": ["Hello", "a " * 3000]},
        {"prompt": "Hello", "logprobs": 50},
    ):
        response = client.post("/v1/completions", json={"stream": True, **body})
        assert response.status_code == 400 and error_of(response)["message"]
    settled(client)


def test_null_is_the_default(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    "And a field that is not known is warned of once."
    body = {"stream": None, "echo": None, "cache_salt": None, "max_tokens": 1, "a_name_of_mine": 1}
    with caplog.at_level(logging.WARNING, "teachvllm"):
        logging.getLogger("teachvllm").addHandler(caplog.handler)
        try:
            for _ in range(3):
                assert (
                    client.post("/v1/completions", json={**body, "prompt": "Hello"}).status_code
                    == 200
                )
                assert (
                    client.post(
                        "/v1/chat/completions", json={**body, "messages": HELLO}
                    ).status_code
                    == 200
                )
        finally:
            logging.getLogger("teachvllm").removeHandler(caplog.handler)
    assert (
        len(
            {
                record.getMessage()
                for record in caplog.records
                if "a_name_of_mine" in record.getMessage()
            }
        )
        == 1
    )
    # two handlers
    assert sum("a_name_of_mine" in record.getMessage() for record in caplog.records) <= 2


def spy_on(real: Any, seen: list[str]) -> Any:
    "The function, which notes in which thread it is called."

    @functools.wraps(real)  # and has its signature
    def spy(*args: Any, **options: Any) -> Any:
        seen.append(threading.current_thread().name)
        return real(*args, **options)

    return spy


def test_a_stream_was_created_once(client: Any) -> None:
    for path, prompt in (
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": HELLO}),
    ):
        body = {**prompt, "stream": True, "max_tokens": 300, "ignore_eos": True}
        *chunks, _ = events_of(client.post(path, json=body))
        assert len(chunks) > 100 and len({(chunk["created"], chunk["id"]) for chunk in chunks}) == 1


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/chat/completions", {"messages": [{"role": "user" * 300_000, "content": "a"}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a", "name": "b " * 500_000}] * 3},
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 2}] * 1024}),
        ("/tokenize", {"prompt": "word " * 400_000, "return_token_strs": True}),
        ("/v1/completions", {"prompt": ["word " * 5000] * 40}),
    ],
    ids=["role", "name", "messages", "tokenize", "prompts"],
)
def test_large_requests_are_read_in_a_thread(
    engine: AsyncLLM, path: str, body: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    "Never in the event loop, which serves the others."
    from teachvllm import inputs
    from teachvllm.entrypoints import serving

    seen: list[str] = []
    for module, name in ((serving, "encode"), (inputs, "apply_chat_template")):
        monkeypatch.setattr(module, name, spy_on(getattr(module, name), seen))
    status, text = ask_app(build_app(engine), "POST", path, json=body)
    assert status in (200, 400) and seen and "MainThread" not in seen, text[:200]
    ask_app(build_app(engine), "POST", "/tokenize", json={"prompt": "Hello"})
    assert seen[-1] == "MainThread"


def test_unknown_models_and_routes(client: Any) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/tokenize", {"prompt": "a"}),
    ):
        response = client.post(path, json={"model": "gpt-4", **body})
        assert response.status_code == 404 and error_of(response)["param"] == "model"
        assert (
            client.post(path, json={"model": "other", "max_tokens": 1, **body}).status_code == 200
        )
    assert (
        error_of(client.get("/v1/engines"))["code"] == 404
        and error_of(client.get("/v1/models/gpt-4"))["code"] == 404
    )
    assert error_of(client.get("/v1/completions"))["code"] == 405


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"prompt"',
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"n": 1e999, "prompt": "a"}',
        b"[" * 100_000,
        b'{"prompt": "a", "stop": ["\\udc00"]}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"n": 1' + b"0" * 5000 + b"}",
    ],
    ids=lambda content: repr(content[:30]),
)
def test_bodies_that_are_no_request(client: Any, content: bytes) -> None:
    response = client.post(
        "/v1/completions", content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400 and error_of(response)["message"]


def test_only_json_is_read(client: Any) -> None:
    "A web page may send other types to a server on this machine without being asked."
    response = client.post(
        "/v1/completions", content=b'{"prompt": "a"}', headers={"content-type": "text/plain"}
    )
    assert response.status_code == 400 and "Content-Type" in error_of(response)["message"]


def test_embeddings_of_a_model_that_writes(client: Any) -> None:
    assert (
        'task="generate"' in error_of(client.post("/v1/embeddings", json={"input": "a"}))["message"]
    )


# Wrong types in every field

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
ROUTES = {
    "/v1/completions": (CompletionRequest, {"prompt": "Hello", "max_tokens": 2}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": HELLO, "max_tokens": 2}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "Hello"}),
    "/tokenize": (TokenizeRequest, {"prompt": "Hello"}),
    "/detokenize": (None, {"tokens": [1, 2]}),
}


@pytest.mark.parametrize("path", ROUTES)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_value_in_any_field(client: Any, path: str, data: st.DataObject) -> None:
    "It is served, or refused with the field's name; and the server never fails."
    cls, body = ROUTES[path]
    field = data.draw(st.sampled_from(sorted(cls.model_fields if cls else ["tokens", "model"])))
    value = data.draw(JSON)
    response = client.post(
        path,
        content=json.dumps({**body, field: value}),
        headers={"content-type": "application/json"},
    )
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code == 404:
        assert field == "model"
    elif response.status_code == 400 and not (
        path == "/v1/embeddings" and "task=" in response.text
    ):
        error = error_of(response)
        assert field in (
            error["param"],
            *error["message"].replace("=", " ").replace(":", " ").split(),
        ), error
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert events_of(response)[-1] == "[DONE]"


# Size and time


def test_ten_megabytes_are_too_much(client: Any) -> None:
    body = json.dumps({"prompt": "a" * 10_000_000}).encode()
    # the second: no content-length
    for content in body, (body[i : i + 100_000] for i in range(0, len(body), 100_000)):
        response = client.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        assert (
            response.status_code == 413 and "--max-request-bytes" in error_of(response)["message"]
        )
    assert (
        client.post("/v1/completions", json={"prompt": "a " * 1_000_000}).status_code == 400
    )  # 2 MB, not tokenized whole


def test_clients_that_send_slowly_are_shut_out(speaker: str) -> None:
    """Half a request's headers, half a body, one byte at a time, nothing at all; and meanwhile the
    server answers.
    """
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        b"Content-Length: 1000\r\n"
    )
    halves = [b"", head, head + b"\r\n" + b'{"prompt":']
    with contextlib.ExitStack() as stack:
        # for this test alone: elsewhere a busy machine may take longer
        args = ServerArgs(port=0, request_timeout=5.0)
        url = stack.enter_context(serve_in_background(EngineArgs(speaker, **OPTIONS), args))
        place = ("127.0.0.1", int(url.rpartition(":")[2]))
        socks = []
        for half in halves:
            socks.append(stack.enter_context(socket.create_connection(place, timeout=20)))
            socks[-1].sendall(half)
        drip = stack.enter_context(socket.create_connection(place, timeout=20))
        drip.sendall(head)
        deadline = time.monotonic() + 60
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline:
                drip.sendall(b"X-A: b\r\n")
                assert httpx.get(f"{url}/health", timeout=20).status_code == 200
                time.sleep(0.1)
            raise AssertionError("the connection is still open")
        answers = [b"".join(iter(lambda sock=sock: sock.recv(65536), b"")) for sock in socks]
    assert answers[:2] == [b"", b""]  # closed
    assert b" 408 " in answers[2].splitlines()[0] and b"--request-timeout" in answers[2]


def test_a_connection_in_use_is_not_closed(speaker: str) -> None:
    """An answer may take longer than a request's headers may, and so may two that were asked for at
    once; then the connection waits as long as at first.
    """
    router = APIRouter()

    @router.get("/slow")
    async def slow() -> str:
        await asyncio.sleep(1.5)
        return "slow"

    args = ServerArgs(port=0, request_timeout=1.0)
    with serve_in_background(EngineArgs(speaker, **OPTIONS), args, routers=[router]) as url:
        place = ("127.0.0.1", int(url.rpartition(":")[2]))
        with socket.create_connection(place, timeout=20) as sock:
            for _ in range(2):
                sock.sendall(b"GET /slow HTTP/1.1\r\nHost: a\r\n\r\n" * 2)
                answers = b""
                while answers.count(b'"slow"') < 2:
                    piece = sock.recv(65536)
                    assert piece, "closed while it was in use"
                    answers += piece
            assert sock.recv(65536) == b""


def test_two_requests_on_one_connection_may_overlap() -> None:
    "The first one's coroutine ends after the second has begun: no timer runs until both are over."

    class Transport(asyncio.Transport):
        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return default

        def is_closing(self) -> bool:
            return False

        def close(self) -> None:
            "It is closed already."

    async def overlap() -> list[bool]:
        config = uvicorn.Config(ask_app, lifespan="off", log_config=None)
        connection = TimedConnection(
            set(), 60.0, {}, config=config, server_state=uvicorn.server.ServerState()
        )
        connection.connection_made(Transport())
        found = [connection.timer.cancelled()]
        with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
            first.enter_context(connection.answering("/a"))
            second.enter_context(connection.answering("/b"))
            first.close()
            found.append(connection.timer.cancelled())
            second.close()
            found.append(connection.timer.cancelled())
        connection.connection_lost(None)
        return [*found, connection.timer.cancelled()]

    assert asyncio.run(overlap()) == [False, True, False, True]


def test_headers_have_a_limit(url: str) -> None:
    place = ("127.0.0.1", int(url.rpartition(":")[2]))
    with socket.create_connection(place, timeout=20) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX-A: " + b"a" * 200_000 + b"\r\n\r\n")
        answer = sock.recv(65536)
        assert not answer or b" 400 " in answer.splitlines()[0]


def test_bodies_whose_end_never_comes(url: str, client: Any) -> None:
    place = ("127.0.0.1", int(url.rpartition(":")[2]))
    for last in "close", "shutdown":
        with socket.create_connection(place, timeout=20) as sock:
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n{"
            )
            if last == "shutdown":
                sock.shutdown(socket.SHUT_WR)
                assert sock.recv(65536) == b""
    assert client.get("/health").status_code == 200


# Who may call


def ask_app(app: Any, method: str, path: str, **more: Any) -> tuple[int, str]:
    "A request to an app, without a server: for what needs no engine."
    status, text, _ = ask_app_fully(app, method, path, **more)
    return status, text


def ask_app_fully(app: Any, method: str, path: str, **more: Any) -> tuple[int, str, Any]:
    async def ask() -> tuple[int, str, Any]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.request(method, path, **more)
            return response.status_code, response.text, response.headers

    return asyncio.run(ask())


@pytest.mark.parametrize("how", ["argument", "environment", "vLLM's"])
def test_the_api_key(engine: AsyncLLM, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how != "argument":
        monkeypatch.setenv(
            "TEACHVLLM_API_KEY" if how == "environment" else "VLLM_API_KEY", "sesame"
        )
    app = build_app(engine, ServerArgs(api_key="sesame" if how == "argument" else None))
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "sesame"},
        {"authorization": "Bearer s\xe9same".encode("latin1")},
    ):
        for method, path in (
            ("GET", "/v1/models"),
            ("POST", "/v1/completions"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
        ):
            status, text = ask_app(app, method, path, headers=headers)
            assert status == 401 and json.loads(text)["error"]["type"] == "AuthenticationError"
            assert "sesame" not in text
    for path in "/health", "/version", "/ping":
        assert ask_app(app, "GET", path)[0] == 200
    assert ask_app(app, "GET", "/v1/models", headers={"authorization": "Bearer sesame"})[0] == 200
    assert "sesame" not in repr(app)


def test_other_origins_only_if_asked_for(engine: AsyncLLM) -> None:
    origin = {"origin": "http://page.example", "access-control-request-method": "POST"}
    assert ask_app(build_app(engine), "OPTIONS", "/v1/completions", headers=origin)[0] == 405
    with pytest.raises(ValueError, match="allowed_origins"):
        ServerArgs(allowed_origins=["[1]"])
    app = build_app(engine, ServerArgs(allowed_origins=['["http://page.example"]'], api_key="k"))
    status, _, headers = ask_app_fully(app, "OPTIONS", "/v1/completions", headers=origin)
    assert status == 200 and headers["access-control-allow-origin"] == "http://page.example"
    assert (
        ask_app(
            app, "OPTIONS", "/v1/completions", headers={**origin, "origin": "http://other.example"}
        )[0]
        == 400
    )


# Chat templates


def test_chat_templates(engine: AsyncLLM, tmp_path: Path) -> None:
    def tokens(args: ServerArgs, **more: Any) -> tuple[int, Any]:
        status, text = ask_app(
            build_app(engine, args), "POST", "/tokenize", json={"messages": HELLO, **more}
        )
        return status, json.loads(text)

    failing = "{{ raise_exception('no such role') }}"
    status, answer = tokens(ServerArgs(chat_template=failing))
    assert (
        status == 400
        and "no such role" in answer["error"]["message"]
        and answer["error"]["param"] == "messages"
    )
    status, answer = tokens(ServerArgs(chat_template="{% for x in range(3 %}"))
    assert status == 400 and "chat template" in answer["error"]["message"]
    (tmp_path / "short.jinja").write_text("{{ messages[0].content }}\n{{ mood }}")
    args = ServerArgs(chat_template=str(tmp_path / "short.jinja"), trust_request_chat_template=True)
    status, answer = tokens(args, chat_template_kwargs={"mood": " fine"})
    assert engine.tokenizer.decode(answer["tokens"]) == "Hello\n fine"
    status, answer = tokens(args, chat_template="{{ messages|length }}")
    assert engine.tokenizer.decode(answer["tokens"]) == "1"
    with pytest.raises(ValueError, match="neither a file nor a template"):
        build_app(engine, ServerArgs(chat_template="/no/such/file"))


# A step that fails


class Broken:
    "An engine of which the second step fails."

    parts = (
        CompletionOutput(0, "a", [5]),
        CompletionOutput(0, "", [], None, None, "error", "RuntimeError: out of paper"),
    )

    async def generate(self, prompt: Any, params: Any, request_id: str, priority: int = 0) -> Any:
        for part in self.parts:
            yield RequestOutput(
                request_id, "Hello", prompt["prompt_token_ids"], [part], part.finished()
            )


class Fails(Broken):
    "An engine that raises an error of its own."

    def __init__(self, error: Exception):
        self.error = error

    async def generate(self, *args: Any, **options: Any) -> Any:
        raise self.error
        yield


def test_whose_fault_an_error_is(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from teachvllm.entrypoints.serving import CompletionWriter
    from teachvllm.executor.executor_base import EngineClosedError

    app = build_app(engine)
    for error, expected in (
        (ValueError("n=0"), 400),
        (EngineClosedError(), 503),
        (ValueError("the engine is closed"), 400),  # the kind decides, not the words
        (RuntimeError("a"), 500),
    ):
        app.state.serving.engine = Fails(error)
        for stream in False, True:
            assert (
                ask_app(app, "POST", "/v1/completions", json={"prompt": "Hello", "stream": stream})[
                    0
                ]
                == expected
            ), error

    def wrong(*args: Any) -> Any:  # a mistake in our code, with pydantic's errors or a plain one
        raise next(errors)

    errors: Any = iter([ValueError("unlucky")] * 2)
    app.state.serving.engine = Broken()
    Broken.parts, parts = Broken.parts[:1], Broken.parts
    monkeypatch.setattr(CompletionWriter, "_choice", wrong)
    try:
        for stream in False, True:
            status, text = ask_app(
                app, "POST", "/v1/completions", json={"prompt": "Hello", "stream": stream}
            )
            assert status == 500 and "unlucky" in text
    finally:
        Broken.parts = parts


def test_siblings_of_a_prompt_that_fails_are_closed(engine: AsyncLLM) -> None:
    closed: list[str] = []

    class Half:
        async def generate(
            self, prompt: Any, params: Any, request_id: str, priority: int = 0
        ) -> Any:
            try:
                part = CompletionOutput(0, "", [], None, None, "error", "out of paper")
                if not closed and len(prompt["prompt_token_ids"]) > 1:
                    await asyncio.sleep(60)
                yield RequestOutput(request_id, "a", prompt["prompt_token_ids"], [part], True)
            finally:
                closed.append(request_id)

    app = build_app(engine)
    app.state.serving.engine = Half()
    status, _ = ask_app(app, "POST", "/v1/completions", json={"prompt": [[5], [6, 7], [8, 9]]})
    assert status == 500 and len(closed) == 3


def test_an_aborted_embedding_is_no_embedding(engine: AsyncLLM) -> None:
    import torch

    from teachvllm.outputs import PoolingOutput, PoolingRequestOutput

    class Aborts:
        model_config = type(
            "M", (), {"pooler_config": None, "vocab_size": 1000, "max_model_len": 99}
        )

        async def encode(self, prompt: Any, params: Any, request_id: str, priority: int = 0) -> Any:
            yield PoolingRequestOutput(
                request_id, PoolingOutput(torch.empty(0)), prompt["prompt_token_ids"], True
            )

    app = build_app(engine)
    app.state.serving.pooling.engine = Aborts()
    status, text = ask_app(app, "POST", "/v1/embeddings", json={"input": ["a", "b"]})
    assert status == 503 and "aborted" in json.loads(text)["error"]["message"]


def test_a_step_that_fails(engine: AsyncLLM) -> None:
    "It is an event where the stream has begun, and else a response with status 500."
    app = build_app(engine)
    app.state.serving.engine = Broken()
    for path, body in (
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": HELLO}),
    ):
        status, text = ask_app(app, "POST", path, json=body)
        assert (
            status == 500 and json.loads(text)["error"]["message"] == "RuntimeError: out of paper"
        )
        status, text = ask_app(app, "POST", path, json={**body, "stream": True})
        *_, last = [json.loads(line[6:]) for line in text.split("\n\n") if line]
        assert (
            status == 200
            and last["error"]["message"] == "RuntimeError: out of paper"
            and last["error"]["code"] == 500
        )


# Clients that leave


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_aborted(client: Any, url: str, stream: bool) -> None:
    body = {
        "prompt": ["Hello"] * 3,
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": stream,
        "n": 2,
        "seed": 1,
    }
    with httpx.Client(base_url=url, timeout=60) as leaving:
        if stream:
            with leaving.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: {")
                assert client.get("/state").json()["requests"] == 3
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post("/v1/completions", json=body, timeout=0.5)
    settled(client)


def test_a_slow_reader_gets_everything(client: Any, url: str) -> None:
    "Nothing waits for it: meanwhile what it did not read is put together, and others are answered."
    body = {
        "prompt": "The river",
        "max_tokens": 1500,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": 3,
    }
    expected = client.post("/v1/completions", json=body).json()["choices"][0]
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=200
    ) as response:
        for _ in range(200):
            if not client.get("/state").json()["requests"]:
                break
            time.sleep(0.05)
        choices = [
            json.loads(line[6:])["choices"][0]
            for line in response.iter_lines()
            if line.startswith("data: {")
        ]
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    for name, values in expected["logprobs"].items():
        assert [value for choice in choices for value in choice["logprobs"][name]] == values, name


def test_a_million_errors_are_one(client: Any) -> None:
    "And the other clients do not wait for it."
    for content in b"1.5," * 900_000 + b"1.5", b"[]," * 100_000 + b"[1.5]":
        body = b'{"prompt": [' + content + b"]}"
        response = client.post(
            "/v1/completions", content=body, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400 and len(response.content) < 1000


NUM = 500  # requests of the load


def resident() -> int:
    "Bytes of memory of this process, which is the server's, too; 0 where it is not known."
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def test_load_with_clients_that_leave(
    engine: AsyncLLM, client: Any, url: str, offline: dict
) -> None:
    """500 requests, 50 at a time, a third of the clients leave at random: all other answers are
    complete, nothing is left.

    No block, task or descriptor, no file in the folder for those, and no more memory than after the
    first 200.
    """
    # type: ignore[attr-defined]
    before = settled(client)
    files = os.listdir(engine.folder)
    num_files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    asked = list(offline)
    finished = list[int]()
    rng = random.Random(7)
    leaves = [rng.random() < 1 / 3 for _ in range(NUM)]
    memory: list[int] = []

    async def one(i: int, http: Any, places: asyncio.Semaphore) -> None:
        prompt, most = asked[i % len(asked)]
        body = {"prompt": prompt, "max_tokens": most, "temperature": 0, "stream": i % 2 == 0}
        async with places:
            if i in (200, NUM - 1):
                memory.append(resident())
            try:
                how = asyncio.wait_for(answer(http, body), rng.random() * 0.3 if leaves[i] else 100)
                assert await how == offline[prompt, most]
                finished.append(i)
            except asyncio.TimeoutError:
                assert leaves[i]

    async def answer(http: Any, body: dict) -> tuple[str, str]:
        if not body["stream"]:
            choice = (await http.post("/v1/completions", json=body)).json()["choices"][0]
            return choice["text"], choice["finish_reason"]
        text = ""
        reason = None
        last = ""
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                last = line or last
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    text = text + choice["text"]
                    reason = choice["finish_reason"] or reason
        assert last == "data: [DONE]"
        return text, reason

    async def everything() -> None:
        places = asyncio.Semaphore(50)
        async with httpx.AsyncClient(
            base_url=url, timeout=100, limits=httpx.Limits(max_connections=60)
        ) as http:
            await asyncio.gather(*(one(i, http, places) for i in range(NUM)))

    asyncio.run(everything())
    assert len(finished) >= NUM - sum(leaves) and len(finished) < NUM
    for _ in range(100):  # a task ends a little later than its request
        after = settled(client)
        if after["tasks"] <= before["tasks"] + 2:
            break
        time.sleep(0.05)
    assert after["tasks"] <= before["tasks"] + 2, (before, after)
    assert memory[1] - memory[0] < 64 << 20, memory
    assert os.listdir(engine.folder) == files  # type: ignore[attr-defined]
    if num_files:
        for _ in range(100):  # connections that were closed by the other side
            if len(os.listdir("/proc/self/fd")) <= num_files:
                break
            time.sleep(0.05)
        assert len(os.listdir("/proc/self/fd")) <= num_files


# Start and end


def test_a_server_in_the_background_leaves_nothing_behind(
    speaker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a busy machine ends streams slowly
    monkeypatch.setattr("teachvllm.entrypoints.api_server.Server.GRACE", 10.0)
    threads = set(threading.enumerate())
    contexts = contextlib.ExitStack()
    with serve_in_background(EngineArgs(speaker, **OPTIONS)) as url:
        port = int(url.rpartition(":")[2])
        body = {"prompt": "a", "stream": True, "max_tokens": 2000, "ignore_eos": True}
        response = contexts.enter_context(
            httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60)
        )
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
    *_, last, done = [line for line in lines if line]
    assert json.loads(last[6:])["choices"][0]["finish_reason"] == "abort" and done == "data: [DONE]"
    contexts.close()
    left = [t for t in set(threading.enumerate()) - threads if t.name.startswith("teachvllm")]
    assert not left
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    EngineArgs.add_cli_args(parser)
    add_server_args(parser)
    return parser.parse_args(argv)


def test_a_start_that_fails_is_one_line(
    speaker: str, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = [
            (["--model", speaker, "--port", port], f"port {port}: Address already in use"),
            (["--model", speaker, "--host", "203.0.113.7", "--port", "0"], "203.0.113.7"),
            (["--model", speaker, "--host", "no such host", "--port", "0"], "no such host"),
            (["--model", speaker, "--port", "99999"], "port=99999"),
            (["--model", str(tmp_path / "none"), "--port", "0"], "does not exist"),
            (["--model", speaker, "--port", "0", "--max-model-len", "0"], "max_model_len"),
        ]
        for argv, words in cases:
            assert run_server(parse("--dtype", "float32", *argv)) == 1
            out, err = capfd.readouterr()
            lines = [line for line in err.splitlines() if not line.startswith("INFO")]
            assert (
                not out
                and len(lines) == 1
                and lines[0].startswith("teachvllm: ")
                and words in lines[0]
            ), err


def test_the_options() -> None:
    from teachvllm.entrypoints.api_server import server_args

    given = server_args(
        parse(
            "--served-model-name",
            "a",
            "b",
            "--api-key",
            "k",
            "--disable-log-requests",
            "--port",
            "0",
        )
    )
    assert given == ServerArgs(served_model_name=["a", "b"], api_key="k", port=0)
    assert server_args(parse()) == ServerArgs() and ServerArgs().host == "127.0.0.1"
    with pytest.raises(ValueError, match="max_request_bytes"):
        ServerArgs(max_request_bytes=0)


SCRIPT = """
import argparse, sys
from teachvllm import EngineArgs
from teachvllm.entrypoints.api_server import Server, add_server_args, run_server
from teachvllm.entrypoints.watch import make_watch_router

Server.GRACE = 10.0  # a busy machine needs longer to ask, and to end its streams

def extend(engine):
    print("core", engine.engine_core.process.pid, flush=True)
    return {"routers": [make_watch_router(engine)]}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    EngineArgs.add_cli_args(parser)
    add_server_args(parser)
    sys.exit(run_server(parser.parse_args(), extend))
"""


@contextlib.contextmanager
def server_process(speaker: str, *argv: str) -> Iterator[tuple[subprocess.Popen, int, str]]:
    "A server in a process of its own; its core's process, and its address."
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    command = [sys.executable, "-c", SCRIPT, "--model", speaker, "--port", "0", *options, *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        core = process.stdout.readline()
        ready = process.stdout.readline()
        assert core.startswith("core ") and "ready at http://127.0.0.1:" in ready, (
            process.stderr and process.stderr.read()
        )
        url = ready.split()[-1]
        assert process.stdout.readline().endswith(f" {url}/watch\n")
        yield process, int(core.split()[1]), url
    finally:
        process.kill()
        process.communicate(timeout=20)


def streams(url: str, num: int, meanwhile: Any, most: int = 1900) -> list[list[str]]:
    "The lines of so many streams; `meanwhile` is called when each has begun."

    async def read(http: Any, begun: list, i: int) -> list[str]:
        body = {
            "prompt": prompt_of(i),
            "max_tokens": most,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        lines = []
        async with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line:
                    lines.append(line)
                    if len(lines) == 1:
                        begun.append(i)
                        if len(begun) == num:
                            await asyncio.to_thread(meanwhile)
        return lines

    async def everything() -> list[list[str]]:
        begun: list[int] = []
        async with httpx.AsyncClient(
            base_url=url, timeout=100, limits=httpx.Limits(max_connections=num)
        ) as http:
            return await asyncio.gather(*(read(http, begun, i) for i in range(num)))

    return asyncio.run(everything())


@contextlib.contextmanager
def half_a_body(url: str) -> Iterator[Any]:
    """A request of which the server has read half the body; what this gives sends the rest, and
    gives the whole answer.
    """
    body = json.dumps({"prompt": "Hello", "max_tokens": 5, "ignore_eos": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: "
        "application/json\r\n"
    )
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as sock:

        def finish() -> bytes:
            sock.sendall(body[5:])
            return b"".join(iter(lambda: sock.recv(65536), b""))

        sock.sendall(head.encode() + body[:5])
        assert httpx.get(f"{url}/health", timeout=20).status_code == 200  # the half has been read
        yield finish


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return True
    return False


def gone(pid: int) -> bool:
    for _ in range(100):
        if not alive(pid):
            return True
        time.sleep(0.05)
    return False


def test_a_server_that_is_told_to_stop_when_its_core_has_died_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    "The time in which `/health` can be asked is for a server that nobody told to stop."
    monkeypatch.setattr(Server, "GRACE", 600.0)
    app = FastAPI()
    app.state.engine = SimpleNamespace(errored=False)
    app.state.traffic = SimpleNamespace(is_draining=False, num_requests=0)
    app.state.prefixes = []
    with bind(ServerArgs(port=0)) as sock:
        server = Server(app, ServerArgs(port=0), sock)
        assert not asyncio.run(server.on_tick(1))
        app.state.engine.errored = True
        server.drain(0.0)
        assert asyncio.run(server.on_tick(2)) and server.exit_code == 1
        server = Server(app, ServerArgs(port=0), sock)
        assert not asyncio.run(server.on_tick(1)) and server.exit_code == 1


def test_when_the_core_dies_every_stream_ends_with_an_error(speaker: str) -> None:
    health: list[Any] = []

    def kill() -> None:
        os.kill(core, signal.SIGKILL)
        for _ in range(100):
            health.append(httpx.get(f"{url}/health", timeout=20))
            if health[-1].status_code != 200:
                break

    with server_process(speaker) as (process, core, url):
        lines = streams(url, 50, kill)
        assert health[-1].status_code == 503 and "dead" in error_of(health[-1])["message"]
        assert process.wait(timeout=60) == 1
    for one in lines:
        error = json.loads(one[-1][6:])["error"]
        assert len(one) >= 2 and error["code"] == 503 and "dead" in error["message"], one[-1]


def test_sigterm_drains(speaker: str) -> None:
    refused: list[Any] = []

    with server_process(speaker, "--shutdown-timeout", "60") as (process, core, url):

        def stop() -> None:
            # so that the server drains until now, also if the streams have ended
            with half_a_body(url) as finish:
                process.send_signal(signal.SIGTERM)
                for _ in range(100):
                    response = httpx.post(
                        f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=20
                    )
                    if response.status_code != 200:
                        break
                    time.sleep(0.02)
                refused.extend([response, httpx.get(f"{url}/health", timeout=20)])
                finish()

        lines = streams(url, 2, stop, 800)
        assert [response.status_code for response in refused] == [503, 503] and refused[0].headers[
            "retry-after"
        ] == "60"
        assert process.wait(timeout=30) == 0 and gone(core)
    for one in lines:
        assert (
            one[-1] == "data: [DONE]"
            and json.loads(one[-2][6:])["choices"][0]["finish_reason"] == "length"
        )


def test_a_drain_has_an_end(speaker: str) -> None:
    "Streams that still run are told that they were aborted."
    with server_process(speaker, "--shutdown-timeout", "0.2") as (process, core, url):
        lines = streams(url, 12, lambda: process.send_signal(signal.SIGINT))
        assert process.wait(timeout=30) == 0 and gone(core)
    assert all(json.loads(one[-2][6:])["choices"][0]["finish_reason"] == "abort" for one in lines)


def test_a_body_that_comes_while_the_server_drains_is_answered(speaker: str) -> None:
    "Its request was let in: the server waits for it."
    with server_process(speaker, "--shutdown-timeout", "60") as (process, core, url):
        with half_a_body(url) as finish:
            process.send_signal(signal.SIGTERM)
            for _ in range(100):
                if httpx.get(f"{url}/health", timeout=20).status_code == 503:
                    break
                time.sleep(0.02)
            answer = finish()
        assert (
            b" 200 " in answer.splitlines()[0]
            and json.loads(answer.split(b"\r\n\r\n", 1)[1])["choices"]
        )
        assert process.wait(timeout=30) == 0


def test_two_servers_on_one_port_before_either_is_ready() -> None:
    args = ServerArgs(port=0)
    with bind(args) as first, pytest.raises(ValueError, match="Address already in use"):
        bind(ServerArgs(port=first.getsockname()[1]))


def test_pages_that_watch_leave_at_once(speaker: str) -> None:
    closed: list[bool] = []

    class Watches:
        def add_request(self, request: Any) -> None: ...
        def record(self, arrived: Any, outputs: Any) -> None: ...
        def abort_request(self, request_id: str) -> None: ...
        def close(self) -> None:
            closed.append(True)

    engine = AsyncLLM.from_engine_args(EngineArgs(speaker, **OPTIONS), [Watches()])
    try:
        with serve_in_background(engine) as url:
            assert httpx.get(f"{url}/health").status_code == 200 and not closed
        assert closed == [True]
    finally:
        engine.shutdown()


def test_curl(url: str) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    command = [
        curl,
        "-sS",
        "-N",
        "--max-time",
        "60",
        f"{url}/v1/completions",
        "-H",
        "Content-Type: application/json",
        "-d",
    ]
    body = {
        "model": "tiny",
        "prompt": "Hello",
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
    }
    whole = json.loads(
        subprocess.run([*command, json.dumps(body)], capture_output=True, check=True).stdout
    )
    out = subprocess.run(
        [*command, json.dumps({**body, "stream": True})], capture_output=True, check=True, text=True
    ).stdout
    lines = [line[6:] for line in out.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    assert (
        "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])
        == whole["choices"][0]["text"]
    )
