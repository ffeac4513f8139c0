"""The server whole: each field, option and route of vLLM's is served, harmless, or refused by name.

`vllm_server.json` lists what vLLM 0.8.5 and 0.32.0 know, read from their sources.
"""

import argparse
import contextlib
import json
import logging
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("zmq")

import torch  # noqa: E402
from speaker import make_speaker  # noqa: E402
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig  # noqa: E402

from teachvllm import LLM, EngineArgs, SamplingParams  # noqa: E402
from teachvllm.__main__ import make_parser  # noqa: E402
from teachvllm.arg_utils import NOT_YET  # noqa: E402
from teachvllm.config import NotSupportedYet  # noqa: E402
from teachvllm.engine.async_llm import AsyncLLM  # noqa: E402
from teachvllm.entrypoints.api_server import (  # noqa: E402
    GUARDED,
    SERVER_NOT_YET,
    ServerArgs,
    build_app,
    serve_in_background,
    server_args,
)
from teachvllm.entrypoints.protocol import (  # noqa: E402
    NOT_SERVED,
    ChatCompletionRequest,
    CompletionRequest,
)

VLLM = json.loads((Path(__file__).parent / "vllm_server.json").read_text())
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 512}
HELLO = [{"role": "user", "content": "Hello"}]
REQUESTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "Hello", "max_tokens": 1}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": HELLO, "max_tokens": 1}),
}
FIELDS = sorted(
    {
        (route, name)
        for routes in VLLM["fields"].values()
        for route, names in routes.items()
        for name in names
    }
)
HARMLESS: dict[str, list[Any]] = {  # fields that are read, and change nothing
    "user": ["ada"],
    "session_id": ["a"],
    "parallel_tool_calls": [True, False],
    "include_reasoning": [True, False],
}


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("speaker")
    make_speaker(folder, max_position_embeddings=2048)
    return str(folder)


@pytest.fixture(scope="module")
def engine(speaker: str) -> Iterator[AsyncLLM]:
    engine = AsyncLLM.from_engine_args(EngineArgs(speaker, **OPTIONS))
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def client(engine: AsyncLLM) -> Iterator[Any]:
    with (
        serve_in_background(engine, ServerArgs(port=0)) as url,
        httpx.Client(base_url=url, timeout=200) as client,
    ):
        yield client


def error_of(response: Any) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == response.status_code, error
    return error


# Fields


def test_the_lists_are_whole() -> None:
    sizes = {
        version: [len(names) for names in routes.values()]
        for version, routes in VLLM["fields"].items()
    }
    assert sizes == {"0.8.5": [54, 43], "0.32.0": [68, 55]}


@pytest.mark.parametrize("route, name", FIELDS, ids=lambda value: str(value))
def test_no_field_of_vllm_is_passed_over(
    client: Any, caplog: pytest.LogCaptureFixture, route: str, name: str
) -> None:
    cls, body = REQUESTS[route]
    served = name in cls.model_fields
    assert served or name in NOT_SERVED, f"{name} is on no list"
    logging.getLogger("teachvllm").addHandler(caplog.handler)
    try:
        if served:
            values = HARMLESS.get(name, [cls.model_fields[name].get_default()])
            values = [None] if values == [...] else values
            for value in values if name not in body else []:
                response = client.post(route, json={**body, name: value})
                assert response.status_code == 200, response.text
            return
        for value in (None, *NOT_SERVED[name][0]):
            response = client.post(route, json={**body, name: value})
            assert response.status_code == 200, response.text
        error = error_of(client.post(route, json={**body, name: "something else"}))
        assert (error["code"], error["param"]) == (400, name)
        assert NOT_SERVED[name][1] in error["message"]
    finally:
        logging.getLogger("teachvllm").removeHandler(caplog.handler)
    assert not [r for r in caplog.records if "passed over" in r.getMessage()]


def test_harmless_fields_are_no_others() -> None:
    for name in HARMLESS:
        assert name in CompletionRequest.model_fields


@pytest.mark.parametrize("key", ["tools", "functions"])
def test_tools_that_are_not_to_be_used(client: Any, key: str) -> None:
    "With `tool_choice` none the answer is that of the conversation without them."
    choice = {"tools": "tool_choice", "functions": "function_call"}[key]
    body = {"messages": HELLO, "max_tokens": 5, "temperature": 0}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    plain = client.post("/v1/chat/completions", json=body).json()
    for more in ({choice: "none"}, {key: [], choice: "none"}, {key: tools, choice: "none"}):
        response = client.post("/v1/chat/completions", json=body | more)
        assert response.status_code == 200, response.text
        assert response.json()["choices"] == plain["choices"]
    for more in ({key: tools}, {key: tools, choice: "auto"}):
        error = error_of(client.post("/v1/chat/completions", json=body | more))
        says = {"tools": "--tool-call-parser", "functions": "newer name"}[key]
        param = choice if key == "tools" and choice in more else key
        assert error["param"] == param and says in error["message"]


CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1, "b": [2]}'},
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "3"}


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
def test_messages_of_agents(client: Any, content: dict[str, Any]) -> None:
    said = {"role": "assistant", "tool_calls": [CALL], **content}
    body = {"messages": [*HELLO, said, RESULT], "max_tokens": 3}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert client.post("/tokenize", json={"messages": body["messages"]}).status_code == 200


def test_what_a_template_sees_of_a_call() -> None:
    "Arguments as a dict, as templates expect it; those that are no JSON object as an empty one."

    def seen(**message: Any) -> dict[str, Any]:
        messages = [{"role": "assistant", **message}]
        return ChatCompletionRequest(messages=messages).messages[0].for_template()  # type: ignore

    message = seen(content=None, tool_calls=[CALL])
    assert message["content"] == "" and message["tool_calls"][0]["id"] == "call_1"
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": [2]}
    for wrong in ("", "{", "[1]", "null", None, {}):
        call = {"type": "function", "function": {"name": "add", "arguments": wrong}}
        [found] = seen(tool_calls=[call])["tool_calls"]
        assert found["function"] == {"name": "add", "arguments": {}}
    assert seen(content="a", tool_calls=[]) == {"role": "assistant", "content": "a"}
    assert seen(content="a", name="b") == {"role": "assistant", "content": "a", "name": "b"}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1"},
        {"role": "assistant", "tool_calls": [{"type": "custom"}]},
        {"role": "assistant", "tool_calls": [{"function": {}}]},
        {"role": "assistant", "tool_calls": "add"},
    ],
    ids=str,
)
def test_messages_that_say_nothing(client: Any, message: dict[str, Any]) -> None:
    error = error_of(client.post("/v1/chat/completions", json={"messages": [*HELLO, message]}))
    assert error["code"] == 400 and error["param"] == "messages"


def test_an_empty_answer_can_be_sent_back(client: Any) -> None:
    "The server itself gives such messages, where reasoning is cut off for instance."
    for message in ({"content": None}, {}, {"tool_calls": []}):
        told = [*HELLO, {"role": "assistant"} | message, *HELLO]
        body = {"messages": told, "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_where_a_prompt_is_cut(client: Any) -> None:
    body = {"prompt": list(range(100, 120)), "echo": True, "max_tokens": 0}
    for side, ids in (
        (None, list(range(113, 120))),
        ("left", list(range(113, 120))),
        ("right", list(range(100, 107))),
    ):
        asked = {"truncate_prompt_tokens": 7, "truncation_side": side, "return_token_ids": True}
        [choice] = client.post("/v1/completions", json=body | asked).json()["choices"]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids, [])
    told = client.post("/v1/chat/completions", json={"messages": HELLO, "return_token_ids": True})
    ids = told.json()["prompt_token_ids"]
    cut = {"truncate_prompt_tokens": 3, "truncation_side": "right", "return_token_ids": True}
    told = client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1, **cut})
    assert told.json()["prompt_token_ids"] == ids[:3]
    error = error_of(client.post("/v1/completions", json={**body, "truncation_side": "middle"}))
    assert error["param"] == "truncation_side"


@pytest.mark.parametrize("route", REQUESTS)
@pytest.mark.parametrize("num", [1, 2])
def test_token_ids_in_responses(client: Any, speaker: str, route: str, num: int) -> None:
    "In a stream those of the prompt come once, and those of the answer add up."
    _, body = REQUESTS[route]
    more = {"max_tokens": 9, "n": num, "ignore_eos": True, "seed": 1}
    more["temperature"] = num - 1  # greedy answers are all the same: it takes one
    plain = client.post(route, json=body | more).json()
    assert "token_ids" not in json.dumps(plain)
    whole = client.post(route, json=body | more | {"return_token_ids": True}).json()
    place = whole["choices"][0] if route == "/v1/completions" else whole
    prompt = place["prompt_token_ids"]
    assert len(prompt) == whole["usage"]["prompt_tokens"]
    asked = body | more | {"return_token_ids": True, "stream": True}
    lines = client.post(route, json=asked).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    added: dict[int, list[int]] = {i: [] for i in range(num)}
    prompts = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            added[choice["index"]] += choice.get("token_ids", [])
            prompts += [
                one["prompt_token_ids"] for one in (chunk, choice) if "prompt_token_ids" in one
            ]
    assert prompts == [prompt] * num
    for choice in whole["choices"]:
        assert len(choice["token_ids"]) == 9 and added[choice["index"]] == choice["token_ids"]
    if route == "/v1/completions" and num == 1:
        with LLM(speaker, **OPTIONS) as llm:
            params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
            [output] = llm.generate("Hello", params, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == whole["choices"][0]["token_ids"]


def test_arguments_for_plugins_reach_the_engine() -> None:
    request = CompletionRequest(prompt="a", vllm_xargs={"a": 1, "b": ["c", 0.5]})
    assert request.to_sampling_params(1, SamplingParams()).extra_args == {"a": 1, "b": ["c", 0.5]}
    assert CompletionRequest(prompt="a").to_sampling_params(1, SamplingParams()).extra_args is None


# Options


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return make_parser("serve")


OPTIONS_OF_VLLM = sorted({flag for flags in VLLM["options"].values() for flag in flags})


@pytest.mark.parametrize("flag", OPTIONS_OF_VLLM)
def test_no_option_of_vllm_is_unknown(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture, flag: str
) -> None:
    name = flag.removeprefix("--").replace("-", "_")
    lists = [name in ServerArgs.__dataclass_fields__, name in SERVER_NOT_YET, name in NOT_YET]
    assert sum(lists) == 1, lists
    if name in NOT_YET:  # `main` says so: see test_command_line.py
        return
    if name not in SERVER_NOT_YET:
        assert hasattr(parser.parse_args(["serve"]), name)
        return
    values, why = SERVER_NOT_YET[name]
    is_flag = any(isinstance(value, bool) for value in values)
    for value in values:
        said = (
            [flag if value else flag.replace("--", "--no-", 1)] if is_flag else [flag, str(value)]
        )
        assert server_args(parser.parse_args(["serve", *said])) == ServerArgs()
        assert ServerArgs(**{name: value}) == ServerArgs()
    capsys.readouterr()
    if not is_flag or True not in values:
        with pytest.raises(SystemExit):
            parser.parse_args(["serve", flag] if is_flag else ["serve", flag, "something-else"])
        told = capsys.readouterr().err
        assert f"{flag} is not supported by teachvllm: {why}" in told and "unrecognized" not in told
        with pytest.raises(NotSupportedYet, match=name):
            ServerArgs(**{name: "something else"})


def test_the_options_lists_are_whole(capsys: pytest.CaptureFixture) -> None:
    assert {version: len(flags) for version, flags in VLLM["options"].items()} == {
        "0.8.5": 32,
        "0.32.0": 65,
    }
    assert set(SERVER_NOT_YET) <= {flag[2:].replace("-", "_") for flag in OPTIONS_OF_VLLM}
    with pytest.raises(SystemExit):
        make_parser("serve").parse_args(["serve", "--help"])
    assert "tool-parser-plugin" not in capsys.readouterr().out


def test_options_as_scripts_write_them(parser: argparse.ArgumentParser) -> None:
    said = ["--allowed-methods", '["GET", "POST"]', "--allowed-headers", "a", "b"]
    said += ["--default-chat-template-kwargs", '{"enable_thinking": false}', "--root-path", "/a"]
    args = server_args(parser.parse_args(["serve", *said, "--disable-fastapi-docs"]))
    assert (args.allowed_methods, args.allowed_headers) == (["GET", "POST"], ["a", "b"])
    assert args.default_chat_template_kwargs == {"enable_thinking": False}
    assert (args.root_path, args.disable_fastapi_docs) == ("/a", True)
    for wrong in ({"allowed_methods": "[1]"}, {"allowed_methods": "[x"}, {"max_log_len": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ServerArgs(**wrong)
    with pytest.raises(ValueError, match="default_chat_template_kwargs"):
        ServerArgs(default_chat_template_kwargs="a")


def app_client(engine: AsyncLLM, **options: Any) -> Any:
    "A client of the app that these options make, through a server of its own."

    @contextlib.contextmanager
    def served() -> Iterator[Any]:
        with (
            serve_in_background(engine, ServerArgs(port=0, **options)) as url,
            httpx.Client(base_url=url, timeout=200) as client,
        ):
            yield client

    return served()


def test_what_the_options_do(engine: AsyncLLM) -> None:
    template = "{{ messages[0].content }}{{ mark }}"
    with app_client(
        engine,
        api_key="sesame",
        root_path="/a",
        disable_fastapi_docs=True,
        enable_tokenizer_info_endpoint=True,
        chat_template=template,
        default_chat_template_kwargs={"mark": "?"},
        allowed_origins=["https://b"],
        allowed_methods=["GET"],
        allow_credentials=True,
    ) as client:
        key = {"authorization": "Bearer sesame"}
        for path in "/v1/models", "/a/v1/models", "/tokenizer_info", "/a/tokenizer_info":
            assert client.get(path).status_code == 401, path
            assert client.get(path, headers=key).status_code == 200, path
        for path in "/docs", "/redoc", "/openapi.json":
            assert client.get(path).status_code == 404
        info = client.get("/tokenizer_info", headers=key).json()
        assert info["chat_template"] == template and info["tokenizer_class"]
        assert not {"vocab_file", "merges_file"} & set(info)

        def text(**more: Any) -> str:
            body = {"messages": HELLO, "add_generation_prompt": False, **more}
            tokens = client.post("/tokenize", json=body, headers=key).json()["tokens"]
            told = client.post("/detokenize", json={"tokens": tokens}, headers=key)
            return str(told.json()["prompt"])

        assert text() == "Hello?" and text(chat_template_kwargs={"mark": "!"}) == "Hello!"
        asked = {"origin": "https://b", "access-control-request-method": "GET"}
        told = client.options("/v1/models", headers=asked).headers
        assert told["access-control-allow-credentials"] == "true"
        assert told["access-control-allow-methods"] == "GET"


# Routes

# it is not over before something else was asked, though the model is tiny
LONG = {"prompt": "a", "stream": True, "max_tokens": 1900, "ignore_eos": True, "n": 8}
POOLING = {
    "/v1/embeddings": {"input": "a"},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
}
OPERATOR = ["/sleep", "/wake_up", "/reset_prefix_cache"]
DEBUG = ["/is_sleeping", "/server_info", "/tokenizer_info"]


@pytest.mark.parametrize("path", POOLING)
def test_an_engine_that_writes_gives_no_vectors(client: Any, path: str) -> None:
    error = error_of(client.post(path, json=POOLING[path]))
    assert error["code"] == 400 and 'task="generate"' in error["message"]


def test_routes_that_were_not_asked_for_are_not_there(client: Any) -> None:
    for path in [*OPERATOR, "/start_profile", "/stop_profile", "/v1/load_lora_adapter"]:
        assert client.post(path, json={}).status_code == 404, path
    for path in DEBUG:
        assert client.get(path).status_code == 404, path


def test_every_route_that_works_needs_the_key(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path))
    app = build_app(engine, ServerArgs(enable_tokenizer_info_endpoint=True))
    paths = {route.path for route in app.routes}
    free = {path for path in paths if not path.startswith(GUARDED)}
    assert free == {
        *("/health", "/ping", "/version", "/load", "/is_sleeping"),
        *("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"),
    }
    assert {*OPERATOR, "/server_info", "/start_profile", "/stop_profile", *POOLING} <= paths


def test_the_load_is_the_number_of_requests(client: Any) -> None:
    assert client.get("/load").json() == {"server_load": 0}
    with client.stream("POST", "/v1/completions", json=LONG) as response:
        lines = response.iter_lines()  # one that nothing holds would close the stream
        assert next(lines).startswith("data: ")
        assert client.get("/load").json() == {"server_load": 1}


def test_sleep_and_wake_up(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    body = {"prompt": "The capital of France is", "max_tokens": 5, "temperature": 0}
    with app_client(engine) as client:
        before = client.post("/v1/completions", json=body).json()["choices"]
        assert client.get("/is_sleeping").json() == {"is_sleeping": False}
        with client.stream("POST", "/v1/completions", json=LONG) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            error = error_of(client.post("/sleep"))
            assert error["code"] == 400 and "there are requests" in error["message"]
            assert client.post("/reset_prefix_cache").json() == {"success": False}
        for _ in range(200):  # until the one that left has gone
            if (told := client.post("/sleep")).status_code == 200:
                break
        assert told.json() == {"status": "sleeping", "level": 1}
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        assert "already" in error_of(client.post("/sleep"))["message"]
        for path, asked in REQUESTS.items():
            error = error_of(client.post(path, json=asked[1]))
            assert error["code"] == 503 and "sleeps" in error["message"]
        assert "weights" in error_of(client.post("/wake_up?tags=kv_cache"))["message"]
        assert "tags" in error_of(client.post("/wake_up?tags=all"))["message"]
        told = client.post("/wake_up?tags=weights").json()
        assert told == {"status": "sleeping", "tags": ["weights"]}
        assert client.post("/wake_up").json() == {"status": "awake", "tags": None}
        assert client.post("/v1/completions", json=body).json()["choices"] == before
        assert client.post("/reset_prefix_cache").json() == {"success": True}
        assert error_of(client.post("/reset_prefix_cache?device=gpu"))["code"] == 400
        assert error_of(client.post("/sleep?level=3"))["code"] == 400
        told = client.get("/server_info").json()["vllm_config"]
        assert isinstance(told, str) and "max_model_len" in told
        told = client.get("/server_info?config_format=json").json()["vllm_config"]
        assert told["model_config"]["max_model_len"] == 2048


def test_profiles(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    "The routes are there; the core, which began without the folder, says what it misses."
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path))
    with app_client(engine) as client:
        told = client.post("/start_profile")
        assert told.status_code == 200 or "VLLM_TORCH_PROFILER_DIR" in told.text
        if told.status_code == 200:
            assert client.post("/stop_profile").status_code == 200


TEXTS = ["The capital of France is Paris.", "A cat sat on the mat.", "Two"]


def test_scores_of_vectors(speaker: str) -> None:
    args = EngineArgs(speaker, **OPTIONS, task="embed")
    with (
        serve_in_background(args, ServerArgs(port=0)) as url,
        httpx.Client(base_url=url, timeout=200) as client,
    ):
        told = client.post("/pooling", json={"input": TEXTS}).json()
        vectors = [entry["data"] for entry in told["data"]]
        assert told["object"] == "list" and told["data"][0]["object"] == "pooling"
        plain = client.post("/v1/embeddings", json={"input": TEXTS}).json()
        assert [entry["embedding"] for entry in plain["data"]] == vectors
        packed = client.post("/pooling", json={"input": "Two", "encoding_format": "base64"}).json()
        assert isinstance(packed["data"][0]["data"], str)
        cosines = [sum(a * b for a, b in zip(vectors[0], vector)) for vector in vectors]
        for names in (
            ("text_1", "text_2"),
            ("queries", "documents"),
            ("queries", "items"),
            ("data_1", "data_2"),
        ):
            body = {names[0]: TEXTS[0], names[1]: TEXTS, "model": speaker}
            told = client.post("/score", json=body).json()
            assert [entry["score"] for entry in told["data"]] == pytest.approx(cosines, abs=1e-4)
            assert [entry["index"] for entry in told["data"]] == [0, 1, 2]
            assert told["data"][0]["object"] == "score" and told["model"] == speaker
            num = plain["usage"]["prompt_tokens"] + len(
                client.post("/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]
            )
            assert told["usage"]["prompt_tokens"] == told["usage"]["total_tokens"] == num
        pairs = client.post("/v1/score", json={"text_1": TEXTS, "text_2": TEXTS}).json()
        assert [entry["score"] for entry in pairs["data"]] == pytest.approx([1, 1, 1], abs=1e-4)
        cut = {"text_1": "cat", "text_2": "a long cat", "truncate_prompt_tokens": 1}
        [same] = client.post("/score", json=cut | {"text_1": "the cat"}).json()["data"]
        assert same["score"] == pytest.approx(1, abs=1e-4)
        order = sorted(range(3), key=lambda i: -cosines[i])
        for path, top in ("/rerank", 0), ("/v1/rerank", 2), ("/v2/rerank", 5):
            body = {"query": TEXTS[0], "documents": TEXTS, "top_n": top}
            told = client.post(path, json=body).json()
            results = told["results"]
            assert [result["index"] for result in results] == order[: top or None]
            assert results[0]["document"] == {"text": TEXTS[order[0]]}
            assert results[0]["relevance_score"] == pytest.approx(cosines[order[0]], abs=1e-4)
            assert told["usage"]["total_tokens"] > 0 and told["id"]
        for body, param in (
            ({}, None),
            ({"text_1": "a"}, None),
            ({"text_1": "a", "documents": ["b"]}, None),
            ({"text_1": "a", "text_2": "b", "queries": "c"}, None),
            ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
            ({"text_1": "a", "text_2": []}, "text_1"),
            ({"text_1": "a", "text_2": ["b"] * 3000}, "text_1"),
            ({"text_1": [1], "text_2": "b"}, "text_1"),
            ({"text_1": "a", "text_2": "b " * 5000}, "text_1"),
            ({"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation"),
        ):
            error = error_of(client.post("/score", json=body))
            assert error["code"] == 400 and param in (None, error["param"]), (body, error)
        for body in ({"query": "a"}, {"query": ["a"], "documents": "b"}, {"documents": ["b"]}):
            assert error_of(client.post("/rerank", json=body))["code"] == 400
        error = error_of(client.post("/classify", json={"input": "a"}))
        assert error["code"] == 400 and "labels" in error["message"] + "labels"
        assert error_of(client.post("/score", json={**cut, "model": "gpt"}))["code"] == 404


def test_labels_and_pairs(tmp_path: Path, speaker: str) -> None:
    "A model with one label: `/classify` gives it, and `/score` reads a pair as one prompt."
    from teachvllm.inputs import get_tokenizer
    from teachvllm.transformers_utils import DEFAULT_MODEL, find_model

    tokenizer = get_tokenizer(find_model(DEFAULT_MODEL, weights=False))
    tokenizer.save_pretrained(tmp_path)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_attention_heads=4,
        max_position_embeddings=256,
        num_labels=1,
        pad_token_id=0,
        id2label={0: "fits"},
        **sizes,
    )
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval().float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)

    def expected(*texts: str) -> float:
        ids = theirs(*texts, return_tensors="pt").input_ids
        return float(model(ids).logits.detach().sigmoid())

    with (
        serve_in_background(EngineArgs(str(tmp_path), **OPTIONS), ServerArgs(port=0)) as url,
        httpx.Client(base_url=url, timeout=200) as client,
    ):
        told = client.post("/score", json={"text_1": "A cat?", "text_2": TEXTS}).json()
        for entry, text in zip(told["data"], TEXTS, strict=True):
            assert entry["score"] == pytest.approx(expected("A cat?", text), abs=1e-4)
        told = client.post("/classify", json={"input": TEXTS}).json()["data"]
        for i, (entry, text) in enumerate(zip(told, TEXTS, strict=True)):
            assert (entry["index"], entry["label"], entry["num_classes"]) == (i, "fits", 1)
            assert math.isclose(entry["probs"][0], expected(text), abs_tol=1e-4)
        error = error_of(client.post("/v1/completions", json={"prompt": "a"}))
        assert error["code"] == 400 and "task=" in error["message"]


# Bodies


def ask_raw(client: Any, head: str, body: bytes = b"") -> bytes:
    "What comes back, to the end, for bytes that are sent as they are."
    place = (client.base_url.host, client.base_url.port)
    with socket.create_connection(place, timeout=100) as sock:
        sock.sendall(head.encode() + b"\r\n\r\n" + body)
        return b"".join(iter(lambda: sock.recv(65536), b""))


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_hundred_megabytes_are_too_much(client: Any, is_chunked: bool) -> None:
    "The client sends them all before it listens, and is told; the server keeps none of them."
    piece = b"x" * (1 << 20)
    content = (piece for _ in range(100)) if is_chunked else piece * 100
    headers = {"content-type": "application/json"}
    response = client.post("/v1/completions", content=content, headers=headers)
    error = error_of(response)
    assert error["code"] == 413 and "--max-request-bytes" in error["message"]
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_a_body_has_one_length(client: Any) -> None:
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        "Content-Length: 15\r\nTransfer-Encoding: chunked"
    )
    answer = ask_raw(client, head, b'f\r\n{"prompt": "a"}\r\n0\r\n\r\n')
    assert b" 400 " in answer.splitlines()[0] and b"Transfer-Encoding" in answer
    assert b"connection: close" in answer.lower()
