"""Programs from PyPI that were written for vLLM run unchanged: lm-eval's `vllm` model and
LangChain's `VLLM`.

They need `pip install -c constraints.txt -e ".[clients]"`; without it all but the alias itself is
skipped.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
from speaker import make_speaker

import teachvllm
from teachvllm import LLM, SamplingParams
from teachvllm.vllm_alias import MODULES, NAMES, as_vllm, main

QUESTIONS = [
    ("The capital of France is", ["Paris", "London", "Rome, which is old"], 0),
    ("Water is made of hydrogen and", ["gold", "oxygen"], 1),
    ("Two plus two is", ["four", "five", "eleven"], 0),
    ("The sun rises in the", ["east", "west and the south"], 0),
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
{rest}
"""
TASKS = {
    "write": """
output_type: generate_until
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["\\n", " e"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "choose": """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "perplexity": """
output_type: loglikelihood_rolling
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""",
}


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("speaker")
    make_speaker(folder)
    return str(folder)


ENGINE = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 128}


# The alias


def test_every_name_of_the_table_is_there() -> None:
    with as_vllm() as vllm:
        assert (
            vllm.__version__ == importlib.metadata.version("vllm")
            and vllm.__teachvllm__ == teachvllm.__version__
        )
        assert importlib.util.find_spec("vllm") is not None
        for module in MODULES:
            imported = importlib.import_module(module)
            assert set(NAMES.get(module, ())) == set(imported.__all__) <= set(dir(imported))
            for name in NAMES.get(module, ()):
                getattr(imported, name)
    assert importlib.util.find_spec("vllm") is None
    assert not [name for name in sys.modules if name.partition(".")[0] == "vllm"]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")


def test_structured_output_under_vllms_names() -> None:
    class City(pydantic.BaseModel):
        name: str

    with as_vllm():
        from vllm.config import DecodingConfig, StructuredOutputsConfig
        from vllm.sampling_params import GuidedDecodingParams, StructuredOutputsParams
    assert GuidedDecodingParams is StructuredOutputsParams is teachvllm.StructuredOutputsParams
    assert GuidedDecodingParams is teachvllm.GuidedDecodingParams
    assert DecodingConfig is StructuredOutputsConfig and DecodingConfig().backend == "auto"
    make = GuidedDecodingParams.from_optional
    assert make() is None and make(json=None, regex=None, backend="teachvllm") is None
    made = make(choice=["a", "b"], json=None, whitespace_pattern=None)
    assert made == StructuredOutputsParams(choice=["a", "b"])
    for schema in (City, City(name="Rome")):
        assert json.loads(make(json=schema).json)["required"] == ["name"]
    with pytest.raises(ValueError, match="only use one kind"):
        make(regex="a", choice=["a"])


def test_a_script_for_vllm_runs_unchanged(speaker: str, tmp_path: Path) -> None:
    script = tmp_path / "offline.py"
    script.write_text("""
import sys
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import destroy_model_parallel
from vllm.inputs import TokensPrompt
assert __name__ == "__main__"
llm = LLM(model=sys.argv[1], dtype="float32", num_gpu_blocks_override=64, tensor_parallel_size=1, max_num_seqs=None)
prompts = ["Hello, my name is", TokensPrompt(prompt_token_ids=[504, 3575, 282])]
for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False):
    print(output.outputs[0].token_ids)
del llm
destroy_model_parallel()
""")
    env = {**os.environ, "PYTHONPATH": str(Path(teachvllm.__file__).parents[1])}
    command = [sys.executable, "-m", "teachvllm.vllm_alias", script, speaker]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    with LLM(speaker, **ENGINE) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        expected = llm.generate(["Hello, my name is", [504, 3575, 282]], params, use_tqdm=False)
    assert done.stdout.splitlines() == [str(output.outputs[0].token_ids) for output in expected]


SCRIPTS = {
    "options": """
from vllm import LLM, EngineArgs
from vllm.utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
group = parser.add_argument_group("Engine arguments")
EngineArgs.add_cli_args(group)
group.set_defaults(max_model_len=128)
parser.add_argument_group("Sampling parameters").add_argument("--max-tokens", type=int)
args = vars(parser.parse_args())
max_tokens = args.pop("max_tokens")
llm = LLM(**args)
params = llm.get_default_sampling_params()
params.max_tokens, params.temperature = max_tokens, 0.0
for output in llm.generate(["Hello, my name is", "The future of AI is"], params):
    print(len(output.outputs[0].token_ids), output.outputs[0].finish_reason)
conversation = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Hello"}]
print(len(llm.chat([conversation] * 2, params, use_tqdm=False)))
""",
    "engine": """
from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.utils import FlexibleArgumentParser

parser = FlexibleArgumentParser(description="the LLMEngine class directly")
parser = EngineArgs.add_cli_args(parser)
args, _ = parser.parse_known_args()
engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
tests = [
    ("A robot may not injure a human being", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
    ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
    ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
]
request_id, lengths = 0, []
while tests or engine.has_unfinished_requests():
    if tests:
        prompt, sampling_params = tests.pop(0)
        engine.add_request(str(request_id), prompt, sampling_params)
        request_id += 1
    request_outputs: list[RequestOutput] = engine.step()
    lengths += [len(o.outputs) for o in request_outputs if o.finished]
print(sorted(lengths))
""",
    "prefix": """
import sys
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

prefix, texts = "You are an expert school principal, skilled in effectively managing faculty. ", []
for caching in (False, True):
    llm = LLM(model=sys.argv[2], dtype="float32", device="cpu", num_gpu_blocks_override=64, enable_prefix_caching=caching)
    llm.generate(prefix)
    outputs = llm.generate([prefix + "Draft", prefix + "Write"], SamplingParams(temperature=0.0))
    texts.append([output.outputs[0].text for output in outputs])
    del llm
    cleanup_dist_env_and_memory()
print(texts[0] == texts[1])
""",
}
SAY = {"options": "6 length\n6 length\n2\n", "engine": "[1, 1, 2]\n", "prefix": "True\n"}


@pytest.mark.parametrize(
    "name",
    [
        "options",
        "engine",
        "prefix",
    ],
)
def test_the_kinds_of_scripts_that_vllm_shows(
    speaker: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """Written afresh after `examples/offline_inference`: options, chat, the engine's own loop,
    caching.
    """
    script = tmp_path / f"{name}.py"
    script.write_text(SCRIPTS[name])
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    options = ["--dtype=float32", "--device", "cpu", "--num_gpu_blocks_override=64"]
    with as_vllm():
        main(
            [
                str(script),
                "--model",
                speaker,
                *options,
                *(["--max_tokens", "6"] if name == "options" else []),
            ]
        )
    assert capsys.readouterr().out == SAY[name]


# lm-eval


@pytest.fixture(scope="module")
def evaluate(speaker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A function: lm-eval's samples of a task on a model of lm-eval's. Nothing is asked of the
    network.
    """
    folder = tmp_path_factory.mktemp("tasks")
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_CACHE", str(folder / "cache"))
    lm_eval = pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    tasks = pytest.importorskip("lm_eval.tasks")
    lines = [
        json.dumps({"question": q, "choices": choices, "gold": gold})
        for q, choices, gold in QUESTIONS
    ]
    (folder / "questions.jsonl").write_text("\n".join(lines))
    for name, rest in TASKS.items():
        task = TASK.format(name=f"tiny_{name}", file=folder / "questions.jsonl", rest=rest)
        (folder / f"{name}.yaml").write_text(task)
    manager = tasks.TaskManager(include_path=str(folder), include_defaults=False)

    def run(model: str, task: str, chat: bool = False, **options: Any) -> list[dict]:
        result = lm_eval.simple_evaluate(
            model=model,
            model_args={"pretrained": speaker, "dtype": "float32", **options},
            tasks=[f"tiny_{task}"],
            task_manager=manager,
            batch_size=4,
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=chat,
        )
        return sorted(result["samples"][f"tiny_{task}"], key=lambda sample: sample["doc_id"])

    with as_vllm():
        yield run


@pytest.mark.parametrize("chat", [False, True])
def test_lm_eval_generates_the_text_that_it_gets_from_transformers(
    evaluate: Any, chat: bool
) -> None:
    expected = [sample["filtered_resps"] for sample in evaluate("hf", "write", chat, device="cpu")]
    options = {"num_gpu_blocks_override": 128, "max_model_len": 200, "max_num_batched_tokens": 7}
    assert [
        sample["filtered_resps"] for sample in evaluate("vllm", "write", chat, **options)
    ] == expected
    assert all(len(text) > 4 for (text,) in expected)


@pytest.mark.parametrize("task", ["choose", "perplexity"])
def test_lm_eval_finds_the_likelihoods_that_it_finds_with_transformers(
    evaluate: Any, task: str
) -> None:
    expected = [sample["filtered_resps"] for sample in evaluate("hf", task, device="cpu")]
    options = {"num_gpu_blocks_override": 128, "max_model_len": 200, "max_num_batched_tokens": 7}
    found = [sample["filtered_resps"] for sample in evaluate("vllm", task, **options)]
    assert len(found) == len(QUESTIONS)
    for a, b in zip(found, expected, strict=True):
        for one, other in zip(a, b, strict=True):
            values = (one, other) if task == "perplexity" else (one[0], other[0])
            assert float(values[0]) == pytest.approx(float(values[1]), abs=1e-3)
            assert task == "perplexity" or bool(one[1]) == bool(other[1])


def test_lm_eval_asks_the_engine_how_long_a_text_may_be(evaluate: Any) -> None:
    "Without max_model_len it reads `llm.llm_engine.model_config.max_model_len`."
    assert len(evaluate("vllm", "write", num_gpu_blocks_override=128)) == len(QUESTIONS)


# LangChain


@pytest.fixture(scope="module")
def langchain(speaker: str) -> Iterator[Any]:
    "Makes a LangChain model of the class `VLLM`; all of them share one engine."
    module = pytest.importorskip("langchain_community.llms.vllm")
    options = {
        "model": speaker,
        "dtype": "float32",
        "vllm_kwargs": {"num_gpu_blocks_override": 128, "device": "cpu"},
    }
    with as_vllm():
        first = module.VLLM(**options)
        with first.client:
            yield lambda **more: first.model_copy(update=more)


def direct(model: Any, prompts: list[str], **params: Any) -> list[str]:
    outputs = model.client.generate(prompts, SamplingParams(**params), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def test_langchain_invokes_and_batches(langchain: Any) -> None:
    model = langchain(temperature=0.0, max_new_tokens=12)
    prompts = [question for question, _, _ in QUESTIONS]
    expected = direct(model, prompts, temperature=0, max_tokens=12)
    assert model.invoke(prompts[0]) == expected[0] and len(expected[0]) > 12
    assert model.batch(prompts) == expected
    assert [g[0].text for g in model.generate(prompts).generations] == expected
    assert "".join(model.stream(prompts[1])) == expected[1]


def test_langchain_stops(langchain: Any) -> None:
    model = langchain(temperature=0.0, max_new_tokens=24)
    text = model.invoke("Two plus two is")
    stop = text[len(text) // 2 :][:4]
    assert model.invoke("Two plus two is", stop=[stop]) == text[: text.index(stop)]


@pytest.mark.parametrize(
    "fields, params",
    [
        (
            {"top_k": 5, "top_p": 0.9, "temperature": 0.8},
            {"top_k": 5, "top_p": 0.9, "temperature": 0.8},
        ),
        (
            {"presence_penalty": 1.5, "frequency_penalty": 0.5},
            {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        ),
        ({"n": 2, "best_of": 3}, {"n": 2, "best_of": 3}),
        ({"logprobs": 2, "ignore_eos": True}, {"logprobs": 2, "ignore_eos": True}),
    ],
)
def test_langchain_passes_the_parameters(langchain: Any, fields: dict, params: dict) -> None:
    "`seed` and `min_tokens` are no fields of `VLLM`: they go with the call."
    model = langchain(max_new_tokens=10, **fields)
    expected = direct(
        model, ["The sun rises in the"], seed=3, min_tokens=6, max_tokens=10, **params
    )
    assert [model.invoke("The sun rises in the", seed=3, min_tokens=6)] == expected
