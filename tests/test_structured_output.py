"""Answers that fit: through the engine, on a random model that would write anything, with a real tokenizer.

What is compiled has tests of its own: `test_structured_matcher.py`, `test_json_schema.py`.
"""

import json
import random
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from teachvllm import LLM, SamplingParams
from teachvllm.config import StructuredOutputsConfig
from teachvllm.inputs import get_tokenizer
from teachvllm.messages import EngineCoreRequest
from teachvllm.sampling_params import StructuredOutputsParams
from teachvllm.structured_output import manager as home
from teachvllm.structured_output.automaton import Automaton, parse_regex
from teachvllm.structured_output.manager import (
    AutomatonBackend,
    AutomatonMatcher,
    CompileThreads,
    GrammarCompilation,
    ReasoningGrammar,
    RequestGrammar,
    StructuredOutputManager,
    XGrammarBackend,
    bytes_kept,
)
from teachvllm.structured_output.token_masks import TokenMasks
from teachvllm.transformers_utils import bundled_model

jsonschema = pytest.importorskip("jsonschema")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
}
ASKED: dict[str, dict[str, Any]] = {
    "regex": {"regex": r"[0-9]{1,3}(\.[0-9]{2})?"},
    "choice": {"choice": ["yes", "no", "yes and no"]},
    "json": {"json": PERSON},
    "grammar": {"grammar": 'root ::= "(" root? ")"'},
}


def fits(kind: str, text: str) -> bool:
    "Judged by others: `re`, `jsonschema`, a count of brackets."
    if kind == "regex":
        return re.fullmatch(ASKED["regex"]["regex"], text) is not None
    if kind == "choice":
        return text in ASKED["choice"]["choice"]
    if kind == "grammar":
        half = len(text) // 2
        return half > 0 and text == "(" * half + ")" * half
    # xgrammar's strings of a limited length may hold control characters, which JSON escapes
    jsonschema.validate(json.loads(text, strict=False), PERSON)
    return True


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    "A random Llama of one layer whose vocabulary is the default model's."
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=49152, **shape, **heads))
    model.save_pretrained(folder)
    return str(folder)


LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 64,
    "block_size": 8,
}


@pytest.fixture(scope="module")
def llm(wide: str) -> Iterator[LLM]:
    llm = LLM(wide, tokenizer=str(bundled_model()), **LIMITS)
    yield llm
    llm.close()


def params(kind: str | None = None, **options: Any) -> SamplingParams:
    bound = StructuredOutputsParams(**ASKED[kind]) if kind else None
    return SamplingParams(structured_outputs=bound, **{"max_tokens": 200, **options})


def answers(llm: LLM, asked: list[SamplingParams]) -> list[list[tuple[str, str | None]]]:
    prompts = [{"prompt_token_ids": [1 + i, 2, 3]} for i in range(len(asked))]
    outputs = llm.generate(prompts, asked, use_tqdm=False)
    return [[(one.text, one.finish_reason) for one in output.outputs] for output in outputs]


@pytest.mark.parametrize("kind", ASKED)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 2, "seed": 1}, {"n": 3}])
def test_every_answer_fits(llm: LLM, kind: str, options: dict[str, Any]) -> None:
    for [*sequences] in answers(llm, [params(kind, **options) for _ in range(4)]):
        for text, reason in sequences:
            # a random model may nest for ever
            assert reason == "length" or fits(kind, text), (text, reason)
            assert reason == "stop" or kind == "grammar"


def test_bound_and_free_requests_in_one_batch(llm: LLM) -> None:
    "Who is not bound writes what it writes alone."
    free = params(temperature=0, max_tokens=12)
    [[alone]] = answers(llm, [free])
    mixed = answers(llm, [free, params("json"), params("choice")])
    assert mixed[0][0] == alone
    assert fits("json", mixed[1][0][0]) and fits("choice", mixed[2][0][0])


def test_other_parameters_keep_their_meaning(llm: LLM) -> None:
    "Penalties, biases and log-probabilities; EOS that is put off; a stop token of one's own."
    tokenizer = llm.get_tokenizer()
    [three] = tokenizer.encode("3")
    asked = StructuredOutputsParams(regex="[0-9]+")
    [[(text, reason)]] = answers(
        llm,
        [
            SamplingParams(
                structured_outputs=asked, temperature=0, logit_bias={three: 100}, max_tokens=5
            )
        ],
    )
    assert (text, reason) == ("33333", "length")
    [output] = llm.generate(
        {"prompt_token_ids": [5]},
        SamplingParams(structured_outputs=asked, logprobs=2, temperature=0, max_tokens=3),
        use_tqdm=False,
    )
    free = llm.generate(
        {"prompt_token_ids": [5]},
        SamplingParams(logprobs=2, temperature=0, max_tokens=1),
        use_tqdm=False,
    )
    # of the model itself, as vLLM's raw ones: those of the first step are the free request's
    [first, *_] = output.outputs[0].logprobs
    [same] = free[0].outputs[0].logprobs
    assert set(same) <= set(first)
    late = SamplingParams(structured_outputs=asked, min_tokens=8, max_tokens=30, seed=3)
    [[(text, _)]] = answers(llm, [late])
    assert len(tokenizer.encode(text)) >= 8 and text.isdigit()
    own = SamplingParams(structured_outputs=asked, stop_token_ids=[three], ignore_eos=True)
    [[(text, reason)]] = answers(llm, [own])
    assert "3" not in text and reason in ("stop", "length")


def test_an_answer_that_has_ended_is_over(llm: LLM) -> None:
    "With `ignore_eos` only EOS may follow, until the request's length."
    [output] = llm.generate(
        {"prompt_token_ids": [5]}, params("choice", ignore_eos=True, max_tokens=9), use_tqdm=False
    )
    [one] = output.outputs
    eos = llm.get_tokenizer().eos_token_id
    assert len(one.token_ids) == 9 and one.token_ids[-3:] == [eos] * 3 and fits("choice", one.text)


def test_preempted_requests_keep_their_grammar(wide: str) -> None:
    few = LIMITS | {"num_gpu_blocks_override": 14, "enable_prefix_caching": False}
    with LLM(wide, tokenizer=str(bundled_model()), **few) as llm:
        bound = StructuredOutputsParams(regex="[a-f]{60}")
        asked = [
            SamplingParams(structured_outputs=bound, max_tokens=100, seed=i, n=1 + i % 2)
            for i in range(6)
        ]
        for sequences in answers(llm, asked):
            for text, reason in sequences:
                assert re.fullmatch("[a-f]{60}", text) and reason == "stop"
        assert llm.llm_engine.engine_core.engine_core.scheduler.num_preemptions > 0


def test_several_workers(llm: LLM, wide: str) -> None:
    "Each gets the same mask."
    asked = [params(kind, temperature=0, max_tokens=40) for kind in ASKED]
    alone = answers(llm, asked)
    with LLM(wide, tokenizer=str(bundled_model()), tensor_parallel_size=2, **LIMITS) as two:
        assert answers(two, asked) == alone


# What is wrong ends its request


WRONG: dict[str, dict[str, Any]] = {
    "a[": {"regex": "a["},
    "(?=a)": {"regex": "(?=a)b"},
    "nothing": {"grammar": "root ::= nothing"},
    "type": {"json": {"type": "strange"}},
    "not": {"json": {"not": {}}},
    "JSON": {"json": "{"},
    "max_size": {"regex": "a{999999999}"},
    "can ever finish": {"json": {"$ref": "#"}},
    "left recursion": {"grammar": 'root ::= root "a" | "b"'},
    "are more than 256000": {"regex": "a" * 256_001},
}


@pytest.mark.parametrize("words", WRONG)
def test_what_is_wrong_is_refused_at_once(llm: LLM, words: str) -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputsParams(**WRONG[words]))
    with pytest.raises(ValueError, match=re.escape(words)):
        answers(llm, [bad])
    assert fits("choice", answers(llm, [params("choice")])[0][0][0])


def test_what_is_found_wrong_later_ends_its_request(llm: LLM) -> None:
    "In the thread that compiles; the one beside it goes on."
    compile = home.AutomatonBackend.compile

    def broken(self: Any, asked: StructuredOutputsParams) -> Any:
        if asked.choice == ["broken"]:
            raise ValueError("this one is broken")
        return compile(self, asked)

    with patch.object(home.AutomatonBackend, "compile", broken):
        bad = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["broken"]))
        prompts = [{"prompt_token_ids": [1]}, {"prompt_token_ids": [2]}]
        engine = llm.llm_engine
        for request_id, prompt, asked in zip("ab", prompts, (bad, params("regex")), strict=True):
            engine.add_request(request_id, prompt, asked)
        ends = {}
        while engine.has_unfinished_requests():
            ends |= {output.request_id: output for output in engine.step() if output.finished}
    assert "this one is broken" in str(ends["a"].outputs[0].stop_reason)
    assert fits("regex", ends["b"].outputs[0].text)


def test_a_grammar_that_takes_too_long_ends_its_request() -> None:
    "From when a thread begins; the time in the queue does not count, and others get a thread."
    never = threading.Event()
    threads = CompileThreads(1)
    slow = GrammarCompilation(threads, threads.submit(never.wait), seconds=0.05)
    behind = GrammarCompilation(threads, threads.submit(lambda: "done"), seconds=0.05)
    assert not slow.is_ready()
    wait_for(lambda: slow.job.began is not None)
    time.sleep(0.1)
    assert not behind.is_ready()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"not compiled within 0.05 s"):
            slow.is_ready()
    wait_for(behind.is_ready)
    assert len(threads.threads) == 2
    never.set()
    wait_for(lambda: len(threads.threads) == 1)  # the late one was a stand-in's
    threads.shutdown()
    for thread in threads.threads:
        thread.join(5)
        assert not thread.is_alive()


def wait_for(is_so: Callable[[], Any]) -> None:
    for _ in range(1000):
        if is_so():
            return
        time.sleep(0.005)
    raise AssertionError("in vain")


def test_threads_that_are_late_are_few() -> None:
    never = threading.Event()
    threads = CompileThreads(1)
    for _ in range(20):
        prerequisite = GrammarCompilation(threads, threads.submit(never.wait), seconds=0)
        time.sleep(0.002)
        if prerequisite.job.began is not None:
            with pytest.raises(ValueError, match="not compiled within"):
                prerequisite.is_ready()
    assert len(threads.threads) <= 1 + threads.MAX_LATE
    never.set()
    threads.shutdown()


def test_every_request_has_an_exception_of_its_own() -> None:
    threads = CompileThreads()

    def fail() -> None:
        raise ValueError("wrong")

    def depth(error: BaseException) -> int:
        return sum(1 for _ in traceback.walk_tb(error.__traceback__))

    job = threads.submit(fail)
    errors = []
    wait_for(job.future.done)
    for _ in range(5):
        with pytest.raises(ValueError, match="wrong") as raised:
            GrammarCompilation(threads, job).is_ready()
        errors.append(raised.value)
    assert len(set(map(id, errors))) == 5 and len(set(map(depth, errors))) == 1
    other = threads.submit(lambda: 1 // 0)
    wait_for(other.future.done)
    with pytest.raises(RuntimeError, match="ZeroDivisionError: integer division"):
        GrammarCompilation(threads, other).is_ready()
    threads.shutdown()


def test_an_aborted_request_takes_its_job_off_the_queue(llm: LLM) -> None:
    "Unless another waits for the same; who asks for it later gets it."
    answers(llm, [params("choice")])
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    manager: StructuredOutputManager = core.structured_output
    free = threading.Event()
    begun: list[str] = []
    compile = home.AutomatonBackend.compile

    def slow(self: Any, asked: StructuredOutputsParams) -> Any:
        begun.append(str(asked.choice))
        free.wait(60)
        return compile(self, asked)

    def bound(text: str) -> SamplingParams:
        return SamplingParams(structured_outputs=StructuredOutputsParams(choice=[text]))

    with patch.object(home.AutomatonBackend, "compile", slow):
        for i in range(2):
            engine.add_request(f"busy {i}", {"prompt_token_ids": [1]}, bound(f"busy {i}"))
        wait_for(lambda: len(begun) == 2)
        for name, text in (("a", "alone"), ("b", "both"), ("c", "both"), ("d", "early")):
            engine.add_request(name, {"prompt_token_ids": [1]}, bound(text))
        with pytest.raises(ValueError, match="blocks"):  # never queued, never wanted
            core.add_request(EngineCoreRequest("e", [1] * 700, bound("many"), 0, [2]))
        assert len(manager.threads.jobs) >= 3
        for name in ("a", "b", "d", "busy 0"):
            engine.abort_request(name)
        assert len(manager.threads.jobs) == 1
        engine.add_request("f", {"prompt_token_ids": [1]}, bound("early"))
        assert len(manager.threads.jobs) == 2
        free.set()
        ended = {}
        while engine.has_unfinished_requests():
            ended |= {one.request_id: one for one in engine.step() if one.finished}
    texts = {name: ended[name].outputs[0].text for name in ended if ended[name].outputs}
    assert texts["c"] == "both" and texts["f"] == "early" and texts["busy 1"] == "busy 1"
    assert "['alone']" not in begun and "['many']" not in begun


def test_tokens_that_end_are_no_text() -> None:
    "EOS with bytes of its own, and a stop token: only where the answer may end."
    vocabulary: list[bytes | None] = [b"a", b"</s>", b'"', b"<", b"ab"]
    masks = TokenMasks(vocabulary, ())
    automaton = Automaton({"root": parse_regex('"[a-z</>]*"')})
    matcher = AutomatonMatcher(automaton, masks, [1, 4])

    def allowed() -> set[int]:
        [byte] = matcher.mask()
        return {i for i in range(5) if byte >> i & 1}

    assert allowed() == {2} and not matcher.accept(1)
    assert matcher.accept(2) and allowed() == {0, 2, 3}
    assert not matcher.accept(1) and not matcher.accept(4)
    assert matcher.accept(0) and matcher.accept(2) and allowed() == {1, 4}
    assert matcher.accept(4) and allowed() == {1, 4}
    matcher.rollback(2)
    assert allowed() == {0, 2, 3}


TAG: dict[str, Any] = {
    "structures": [{"begin": "e=", "schema": {"enum": [1, 22]}, "end": ";"}],
    "triggers": ["e"],
}


@pytest.mark.parametrize("backend", ["auto", "xgrammar"])
def test_structural_tags(llm: LLM, wide: str, backend: str) -> None:
    "Free text, and behind a trigger, here a letter that comes often, what must follow it."
    asked = [
        SamplingParams(
            structured_outputs=StructuredOutputsParams(structural_tag=TAG),
            max_tokens=120,
            seed=i,
            temperature=2.0 * (i > 0),
        )
        for i in range(6)
    ]
    if backend == "xgrammar":
        pytest.importorskip("xgrammar")
        with LLM(
            wide, tokenizer=str(bundled_model()), guided_decoding_backend=backend, **LIMITS
        ) as other:
            found = answers(other, asked)
    else:
        found = answers(llm, asked)
    num_tags = 0
    for [(text, _)] in found:
        begun = re.sub("e=(1|22);", "", text)
        num_tags += len(begun) < len(text)
        rest = begun.partition("e")[1:]
        assert "".join(rest) in ("", "e", "e=", "e=1", "e=2", "e=22"), text
    assert num_tags > 3


def test_a_reasoning_parser_that_is_not_known_is_noticed_at_once(wide: str) -> None:
    for options in (
        {"reasoning_parser": "qwen33"},
        {"structured_outputs_config": {"reasoning_parser": "qwen33"}},
    ):
        with pytest.raises(ValueError, match="'qwen33' is not known: choose of deepseek_r1, qwen3"):
            LLM(wide, tokenizer=str(bundled_model()), **LIMITS | options)


def test_a_waiting_request_does_not_stop_others(llm: LLM) -> None:
    free = threading.Event()
    compile = home.AutomatonBackend.compile

    def slow(self: Any, asked: StructuredOutputsParams) -> Any:
        free.wait(60)
        return compile(self, asked)

    engine = llm.llm_engine
    with patch.object(home.AutomatonBackend, "compile", slow):
        own = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["its own"]))
        engine.add_request("bound", {"prompt_token_ids": [1]}, own)
        engine.add_request("free", {"prompt_token_ids": [2]}, params(max_tokens=3))
        ended = []
        while engine.has_unfinished_requests():
            ended += [output.request_id for output in engine.step() if output.finished]
            if ended:
                free.set()
    assert ended == ["free", "bound"]


def test_beams_and_missing_tokenizers_are_refused_by_name(llm: LLM, wide: str) -> None:
    with LLM(wide, skip_tokenizer_init=True, **LIMITS) as blind:
        with pytest.raises(ValueError, match="skip_tokenizer_init=True"):
            answers(blind, [params("choice", detokenize=False)])
    with pytest.raises(ValueError, match="guided_decoding_backend='guidance'"):
        LLM(wide, guided_decoding_backend="guidance", **LIMITS)
    other = StructuredOutputsParams(choice=["a"], backend="xgrammar")
    with pytest.raises(ValueError, match="this engine has guided_decoding_backend='auto'"):
        answers(llm, [SamplingParams(structured_outputs=other)])


def test_xgrammar_as_another_backend(wide: str) -> None:
    "Behind the same interface: forks, preemption, drafts and all else are the engine's."
    pytest.importorskip("xgrammar")
    few = LIMITS | {"num_gpu_blocks_override": 24}
    options = {"guided_decoding_backend": "xgrammar"}
    with LLM(wide, tokenizer=str(bundled_model()), **few, **options) as llm:
        asked = [params(kind, n=1 + 2 * i, seed=i) for kind in ASKED for i in range(2)]
        for kind, sequences in zip([k for k in ASKED for _ in range(2)], answers(llm, asked)):
            for text, reason in sequences:
                assert reason == "length" or fits(kind, text), (kind, text)
        core = llm.llm_engine.engine_core.engine_core
        tokenizer = get_tokenizer(bundled_model())
        greedy = [params(kind, temperature=0, max_tokens=40) for kind in ASKED]
        plain = answers(llm, greedy)

        def guess(scheduler: Any) -> dict[int, list[int]]:
            return dict.fromkeys(scheduler.seqs, tokenizer.encode('{"name": "a')[:4])

        with patch.object(core, "drafter", guess):
            assert answers(llm, greedy) == plain
        ended = params("choice", ignore_eos=True, max_tokens=9)
        [output] = llm.generate({"prompt_token_ids": [5]}, ended, use_tqdm=False)
        eos = llm.get_tokenizer().eos_token_id
        assert output.outputs[0].token_ids[-3:] == [eos] * 3
        tag = {"structures": [{"begin": "a", "schema": {"not": {}}, "end": ""}], "triggers": ["a"]}
        for wrong, words in (
            ({"regex": "a["}, "xgrammar cannot serve regex"),
            ({"json": {"type": "array", "uniqueItems": True}}, "the keyword 'uniqueItems'"),
            ({"json": "[1"}, "xgrammar cannot serve json"),
            ({"structural_tag": tag}, "the keyword 'not'"),
            ({"json_object": True, "whitespace_pattern": " "}, "whitespace_pattern"),
        ):
            with pytest.raises(ValueError, match=words):
                answers(llm, [SamplingParams(structured_outputs=StructuredOutputsParams(**wrong))])
        unwritable = StructuredOutputsParams(choice=["\x04"])
        [output] = llm.generate(
            {"prompt_token_ids": [5]},
            SamplingParams(structured_outputs=unwritable),
            use_tqdm=False,
        )
        assert "choice: no token of the model" in output.outputs[0].stop_reason


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"structured_outputs": StructuredOutputsParams(choice=["\x04"])}, "choice: no token of"),
        ({"structured_outputs": StructuredOutputsParams(regex="a\\x04")}, "no token of the model"),
        (
            {
                "structured_outputs": StructuredOutputsParams(choice=["yes"]),
                "allowed_token_ids": [7, 70],
            },
            "allowed_token_ids has none of the tokens that the grammar allows",
        ),
    ],
)
def test_a_grammar_that_leaves_no_token_says_so(llm: LLM, wrong: dict, words: str) -> None:
    free, bound = llm.generate(
        [{"prompt_token_ids": [5]}] * 2,
        [SamplingParams(max_tokens=3), SamplingParams(max_tokens=5, **wrong)],
        use_tqdm=False,
    )
    assert free.outputs[0].finish_reason == "length"
    assert bound.outputs[0].finish_reason == "error"
    assert bound.outputs[0].stop_reason.startswith("GrammarError: ")
    assert words in bound.outputs[0].stop_reason


def test_allowed_tokens_within_a_grammar(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    ids = [tokenizer.encode(letter)[0] for letter in "yes"] + [tokenizer.eos_token_id]
    asked = StructuredOutputsParams(choice=["yes", "no"])
    [[(text, reason)]] = answers(
        llm, [SamplingParams(structured_outputs=asked, allowed_token_ids=ids, temperature=1)]
    )
    assert (text, reason) == ("yes", "stop")


# Drafts, forks and all else at once


def test_drafts_are_checked_by_the_grammar(llm: LLM) -> None:
    "Right ones and wrong ones change nothing of the answers but the number of steps."
    core = llm.llm_engine.engine_core.engine_core
    asked = [params(kind, temperature=0, max_tokens=60) for kind in ASKED]
    plain = answers(llm, asked)
    tokenizer = get_tokenizer(bundled_model())
    generator = random.Random(0)
    texts = ['{"name": "', "yes and no", "((((", "123", "))"]

    def guess(scheduler: Any) -> dict[int, list[int]]:
        return {i: tokenizer.encode(generator.choice(texts))[:4] for i in scheduler.seqs}

    with patch.object(core, "drafter", guess):
        assert answers(llm, asked) == plain


@pytest.mark.parametrize("backend", ["teachvllm", "xgrammar"])
def test_what_must_come_is_drafted(wide: str, backend: str) -> None:
    "The same answers, in fewer steps; in an engine whose drafts would otherwise be few."
    if backend == "xgrammar":
        pytest.importorskip("xgrammar")
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
    asked = [
        params(kind, **options)
        for kind in ("json", "choice")
        for options in ({"temperature": 0}, {"temperature": 1, "seed": 3, "n": 2})
    ]
    asked = [*asked, params(temperature=0, max_tokens=9), params("grammar", max_tokens=20, seed=1)]
    settings: dict[str, Any] = {"guided_decoding_backend": backend, **LIMITS}
    forced = StructuredOutputManager.forced_drafts
    texts, counts = [], []
    for propose in (lambda *_: {}, forced):
        with (
            patch.object(StructuredOutputManager, "forced_drafts", propose),
            LLM(wide, tokenizer=str(bundled_model()), speculative_config=drafts, **settings) as own,
            own.record() as trace,
        ):
            texts.append(answers(own, asked))
        counts.append(len(trace.steps))
    assert texts[0] == texts[1] and counts[1] < 0.9 * counts[0], counts


def test_forced_text_is_that_of_xgrammar() -> None:
    "All along answers that a random choice of tokens writes."
    pytest.importorskip("xgrammar")
    config: Any = SimpleNamespace(
        structured_outputs_config=StructuredOutputsConfig(),
        model_config=SimpleNamespace(
            vocab_size=49152,
            skip_tokenizer_init=False,
            tokenizer=str(bundled_model()),
            trust_remote_code=False,
            tokenizer_mode="auto",
        ),
    )
    tokenizer = get_tokenizer(bundled_model())
    [end] = tokenizer.encode("<|im_end|>")
    rng = random.Random(0)
    num_forced = 0
    for kind in ("json", "choice", "regex"):
        asked = StructuredOutputsParams(disable_any_whitespace=True, **ASKED[kind])
        ours, theirs = (
            kind_of(config, tokenizer).compile(asked).matcher([end])
            for kind_of in (AutomatonBackend, XGrammarBackend)
        )
        for _ in range(60):
            forced = ours.forced_text()
            num_forced += len(forced)
            assert forced == theirs.forced_text()
            bits = np.unpackbits(np.frombuffer(ours.mask(), np.uint8), bitorder="little")
            token_id = int(rng.choice(np.flatnonzero(bits)))
            if token_id == end or not theirs.accept(token_id):
                break
            assert ours.accept(token_id)
    assert num_forced > 20


def test_matchers_are_few() -> None:
    "One for each sequence: what was written tells them apart, and a fork gets its own."

    class Counted:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def accept(self, token_id: int) -> bool:
            self.tokens.append(token_id)
            return token_id < 100

        def rollback(self, num_tokens: int) -> None:
            del self.tokens[len(self.tokens) - num_tokens :]

        def mask(self) -> bytes:
            return b"\1" + bytes(self.tokens)

    grammar = RequestGrammar(Counted)
    generator = random.Random(0)
    sequences: list[list[int]] = [[]]
    for _ in range(300):
        tokens = generator.choice(sequences)
        if len(sequences) < 4 and generator.random() < 0.1:
            sequences.append(list(tokens))
        drafts = [generator.randrange(100) for _ in range(generator.randrange(3))]
        masks = grammar.bitmask(list(tokens), drafts)
        assert masks == [b"\1" + bytes(tokens + drafts[:i]) for i in range(len(drafts) + 1)]
        tokens.append(generator.randrange(100))
    assert len(grammar.followed) <= 8 and len(grammar.lengths) <= 8
    with pytest.raises(ValueError, match="token 200 does not fit"):
        grammar.bitmask([200], [])


def test_reasoning_among_drafts() -> None:
    "The grammar begins behind the tag, wherever that comes, and a wrong draft behind it is no fault."

    class OnlyTwo:
        def accept(self, token_id: int) -> bool:
            return token_id == 2

        def rollback(self, num_tokens: int) -> None:
            pass

        def mask(self) -> bytes:
            return b"two"

    grammar = ReasoningGrammar(RequestGrammar(OnlyTwo), [8, 9], 3)
    free = b"\xff" * 3
    assert grammar.bitmask([1], []) == [free]
    assert grammar.bitmask([8], [1, 9]) == [free] * 3
    assert grammar.bitmask([1], [8, 9, 7, 2]) == [free, free, b"two", b"two", b"two"]
    assert grammar.bitmask([1, 8], [9, 2]) == [free, b"two", b"two"]
    assert grammar.bitmask([1, 8, 9, 2], []) == [b"two"]
    with pytest.raises(ValueError, match="does not fit"):
        grammar.bitmask([1, 8, 9, 7], [])


def test_a_grammar_that_explodes_ends_its_request_only(llm: LLM) -> None:
    "Its states would be millions: a mask has a limit, and the core goes on."
    bad = StructuredOutputsParams(regex=r"x[\s\S]*[a-m][\s\S]{60}")
    prompts = [{"prompt_token_ids": [1]}, {"prompt_token_ids": [2]}]
    asked = [SamplingParams(structured_outputs=bad, max_tokens=50), params("choice")]
    broken, whole = llm.generate(prompts, asked, use_tqdm=False)
    assert broken.outputs[0].finish_reason == "error"
    assert "too many states" in str(broken.outputs[0].stop_reason)
    assert fits("choice", whole.outputs[0].text)


def test_two_hundred_requests(wide: str) -> None:
    """A third of them bound, some cancelled, forked, preempted, with wrong grammars among them: no
    wrong answer, nothing left behind, the engine alive.
    """
    generator = random.Random(7)
    few = LIMITS | {"num_gpu_blocks_override": 30}
    kinds: dict[str, str | None] = {}
    ended: dict[str, Any] = {}
    refused = 0
    with LLM(wide, tokenizer=str(bundled_model()), **few) as llm:
        engine = llm.llm_engine
        for i in range(200):
            name = f"r{i}"
            kind = generator.choice([*ASKED, *[None] * 8])
            options = {"n": generator.choice([1, 1, 3]), "seed": i, "max_tokens": 60}
            asked = params(kind, **options)
            if generator.random() < 0.05:
                asked = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a["))
            try:
                engine.add_request(name, {"prompt_token_ids": [1 + i % 50, 7]}, asked)
                kinds[name] = kind
            except ValueError:
                refused += 1
            if generator.random() < 0.1 and kinds:
                engine.abort_request(generator.choice(list(kinds)))
            for _ in range(generator.randrange(3)):
                ended |= {one.request_id: one for one in engine.step() if one.finished}
        while engine.has_unfinished_requests():
            ended |= {one.request_id: one for one in engine.step() if one.finished}
        core = engine.engine_core.engine_core
        assert core.scheduler.block_manager.get_num_free_gpu_blocks() == 30
        assert not core.scheduler.groups and not core.scheduler.seqs
    assert refused > 3 and len(ended) > 150
    for name, output in ended.items():
        for one in output.outputs:
            if kinds[name] and one.finish_reason == "stop":
                assert fits(str(kinds[name]), one.text)


def test_what_is_compiled_is_kept_and_bounded(llm: LLM) -> None:
    answers(llm, [params("choice")])
    core = llm.llm_engine.engine_core.engine_core
    manager: StructuredOutputManager = core.structured_output
    with patch.object(home, "MAX_KEPT_BYTES", 60_000):
        for i in range(40):
            bound = StructuredOutputsParams(choice=[f"choice {i}"])
            [[(text, _)]] = answers(llm, [SamplingParams(structured_outputs=bound)])
            assert text == f"choice {i}"
        total = sum(bytes_kept(key, job) for key, job in manager.compiled.items())
        assert 3 <= len(manager.compiled) < 40 and total < 100_000
    with patch.object(home, "MAX_KEPT_BYTES", 1):  # all are outgrown at once
        before = next(reversed(manager.compiled.values()))
        answers(llm, [SamplingParams(structured_outputs=bound)])
        assert next(reversed(manager.compiled.values())) is not before
    assert threading.active_count() < 20


def test_a_long_answer_takes_linear_time() -> None:
    "Texts are looked at as often as tokens come: by Python's own loops, and for each length once."
    made = 0

    class Free:
        def __init__(self) -> None:
            nonlocal made
            made += 1

        def accept(self, token_id: int) -> bool:
            return True

        def rollback(self, num_tokens: int) -> None:
            pass

        def mask(self) -> bytes:
            return b"\1"

    grammar = RequestGrammar(Free)
    sequences: list[list[int]] = [[i] for i in range(50)]
    grammar.bitmask([], [])
    for _ in range(200):
        for tokens in sequences:
            grammar.bitmask(list(tokens), [])
            tokens.append(len(tokens))
    assert made == 50 and len(grammar.followed) == 50 and grammar.lengths == {200: 50}
