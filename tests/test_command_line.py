"""`teachvllm …` as a user types it: what it says, what ends an answer and what ends the program."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from teachvllm.__main__ import main
from teachvllm.benchmarks.engine import bench_scheduler

SMALL = ["--num-gpu-blocks-override", "64", "--max-model-len", "512"]


def command(*words: str, **options) -> subprocess.Popen:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TEACHVLLM_LOGGING_LEVEL": "ERROR"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "-m", *words], env=env, text=True, **{**pipes, **options}
    )


def folder_of(path: Path, **config) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


# What needs no model


def test_version(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("teachvllm 0.")


def test_help_of_the_benchmark_runs_no_benchmark() -> None:
    out, error = command("teachvllm.benchmarks.engine", "--help").communicate(timeout=100)
    assert (
        out.startswith("usage: python -m teachvllm.benchmarks.engine")
        and "scheduler, measured" not in out
    ), error


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["run-batch"], "vLLM's command `run-batch` is not in teachvllm yet"),
        (
            ["generate", "x", "--speculative-model", "tiny"],
            "vLLM's --speculative-model is not in teachvllm yet",
        ),
        (["generate", "x", "--max-token", "3"], "did you mean --max-tokens?"),
    ],
)
def test_what_is_not_there_is_refused_by_name(
    argv: list[str], said: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_only_what_a_user_can_write_is_suggested(capsys: pytest.CaptureFixture) -> None:
    """`run` and `command` are names inside the program, and no options; `--url` is one of `chat`
    only.
    """
    for argv, near in (
        (["chat", "--run"], "--run?"),
        (["inspect", "--ur", "x"], "--url?"),
        (["generate", "x", "--commands"], "--command?"),
    ):
        with pytest.raises(SystemExit):
            main(argv)
        assert f"did you mean {near}" not in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["chat", "--ur", "x"])
    assert "did you mean --url?" in capsys.readouterr().err


def test_a_measurement_that_cannot_end_is_refused() -> None:
    with pytest.raises(ValueError, match="num_steps"):
        bench_scheduler(1, num_steps=5000)


# A client


class Answers(BaseHTTPRequestHandler):
    """A server that streams two pieces and then an event with only the usage; it refuses the text
    `no`.
    """

    asked: ClassVar[list[dict[str, Any]]] = []  # the requests

    def do_GET(self) -> None:
        self.reply(200, json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body["prompt"] == "no":
            return self.reply(400, json.dumps({"error": {"message": "that is refused"}}))
        events = [
            {"choices": [{"text": " one"}]},
            {"choices": [{"text": " two"}]},
            {"choices": [], "usage": {}},
            {"usage": {}},
        ]
        self.reply(
            200, "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        )

    def reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    "Its address; and a proxy that leads nowhere, which must not be asked for this machine."
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://localhost:{server.server_port}/v1"
    server.shutdown()
    thread.join(20)
    server.server_close()


def test_a_refused_line_does_not_end_the_program(
    answers: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("zero\nno\nagain\n"))
    assert main(["complete", "--url", answers]) == 0
    out, error = capsys.readouterr()
    assert out.count(" one two") == 2 and error.count("that is refused") == 1
    assert main(["complete", "zero", "no", "again", "--url", answers]) == 1
    assert capsys.readouterr().out.count(" one two") == 1, (
        "texts of the command line are all or nothing from there on"
    )


def test_options_of_a_request_reach_the_server(answers: str) -> None:
    """What is not in OpenAI's interface only if it was asked for: a server may refuse fields that
    it does not know.
    """
    Answers.asked.clear()
    for options in (
        [],
        ["--min-p", "0.1", "--top-k", "5", "--top-p", "0.9", "--sampling-seed", "3", "--stop", "x"],
    ):
        assert main(["complete", "zero", "--url", answers, *options]) == 0
    plain, full = Answers.asked
    assert plain["temperature"] == 0 and not {"min_p", "top_k", "seed", "stop"} & set(plain)
    assert {
        "min_p": 0.1,
        "top_k": 5,
        "top_p": 0.9,
        "seed": 3,
        "stop": ["x"],
    }.items() <= full.items()


# inspect


def test_inspect_says_what_is_not_supported(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    bert = folder_of(tmp_path / "bert", model_type="bert", architectures=["BertForMaskedLM"])
    assert main(["inspect", "--model", bert]) == 0
    out = capsys.readouterr().out
    assert "architecture BertForMaskedLM is not supported" in out and "max_model_len" not in out
    t5 = folder_of(tmp_path / "t5", model_type="t5", architectures=["T5ForConditionalGeneration"])
    assert main(["inspect", "--model", t5]) == 1
    assert "encoder with a decoder" in capsys.readouterr().err


def test_inspect_says_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    shape = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1024}
    small = folder_of(
        tmp_path / "small",
        **shape,
        hidden_size=1024,
        num_hidden_layers=2,
        max_position_embeddings=128,
    )
    assert (
        main(["inspect", "--model", small, "--dtype", "float32", "--num-gpu-blocks-override", "16"])
        == 0
    )
    facts = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    layer = 4 * 1024 * 1024 + 3 * 1024 * 11008 + 2 * 1024
    assert facts["weights"].strip() == f"{4 * (2 * layer + 2 * 1024 * 1024 + 1024) / 2**30:.2f} GiB"
    assert facts["KV cache"].strip() == "up to 16 blocks: 2.0 requests of max_model_len at once"
    large = folder_of(
        tmp_path / "large",
        **shape,
        hidden_size=16384,
        num_attention_heads=128,
        num_hidden_layers=400,
    )
    assert main(["inspect", "--model", large]) == 0
    assert "does not fit: no memory for the KV cache" in capsys.readouterr().out


def test_a_reader_that_has_gone_is_no_error() -> None:
    process = command("teachvllm", "inspect")
    process.stdout.close()  # type: ignore[union-attr]
    assert "Traceback" not in process.stderr.read()  # type: ignore[union-attr]
    assert process.wait(100) == 141


# generate and chat


def test_blank_lines_are_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time\n\n   \nThe sky\n"))
    assert main(["generate", "-", "--max-tokens", "2", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(lines) == 2
        and lines[0].startswith("Once upon a time")
        and lines[1].startswith("The sky")
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n"))
    assert main(["generate", "-"]) == 1
    assert "nothing to continue" in capsys.readouterr().err


def test_chat_goes_on_when_the_conversation_is_too_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    long = "word " * 60
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([long, long, "word " * 600, "Hello"])))
    options = ["--max-tokens", "4", "--num-gpu-blocks-override", "64", "--max-model-len", "160"]
    assert main(["chat", *options]) == 0
    out, error = capsys.readouterr()
    assert (
        error.count("the oldest question is left out") >= 1
        and error.count("maximum model length of 160") == 1
    )
    assert out.count("> ") == 5, "four questions, and the end of the input"


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_ends_the_answer_not_the_program() -> None:
    process = command("teachvllm", "chat", "--max-tokens", "2000")
    assert process.stdin and process.stdout and process.stderr
    process.stdin.write("Tell me a long story about the sea.\n")
    process.stdin.flush()
    read = process.stdout.read(12)  # "> " and the first words
    process.send_signal(signal.SIGINT)
    out, error = process.communicate("What is the capital of France?\n", timeout=200)
    assert process.returncode == 0, error
    first, interrupted, second = (read + out).rpartition("(interrupted)")
    assert interrupted and second.strip("> \n"), "the second question has an answer"
