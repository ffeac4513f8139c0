"""Random requests, aborts and failures on pools that are too small: the same tokens as alone, and
nothing is left behind.
"""

import random
import signal
from dataclasses import replace
from typing import Any

import pytest
from helpers import VOCAB

from teachvllm import LLM, RequestOutputKind, SamplingParams
from teachvllm.engine.output_processor import RequestState


def tiny(folder: str, **options: Any) -> LLM:
    return LLM(folder, dtype="float32", skip_tokenizer_init=True, swap_space=0.001, **options)


@pytest.fixture(scope="module")
def alone(folder: str):
    "An engine with all the room it wants."
    with tiny(folder, num_gpu_blocks_override=64) as llm:
        yield llm


class Run:
    """One engine of random size, with random requests; `go` takes it to the end and checks after
    every step.
    """

    def __init__(self, folder: str, seed: int):
        self.rng = rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4, 16])
        self.options = {
            "block_size": block_size,
            "num_gpu_blocks_override": max(1, rng.randint(30, 120) // block_size),
            "max_num_batched_tokens": rng.choice([1, 2, 5, 16, 64]),
            "max_num_seqs": rng.choice([1, 2, 5, 20]),
            "max_model_len": rng.choice([40, 64, 128]),
            "enable_prefix_caching": rng.random() < 0.5,
            "preemption_mode": rng.choice(["recompute", "swap"]),
        }
        self.pool = block_size * self.options["num_gpu_blocks_override"]
        self.requests = {f"r{i}": self.request(i) for i in range(14)}
        self.tokens: dict[str, list[int]] = {name: [] for name in self.requests}
        self.ended: dict[str, str] = {}
        self.aborted: set[str] = set()
        self.llm = tiny(folder, **self.options)

    def request(self, i: int) -> tuple[list[int], SamplingParams]:
        rng = self.rng
        length = rng.randint(1, min(self.options["max_model_len"] - 1, self.pool))
        params = SamplingParams(
            temperature=rng.choice([0, 1.0]),
            top_p=rng.choice([1, 0.8]),
            top_k=rng.choice([-1, 5]),
            seed=rng.choice([i, 2**63 + i, -7]),
            max_tokens=rng.choice([1, 5, 20, None]),
            ignore_eos=True,
            stop_token_ids=rng.choice([[], [7], [1, 2, 3, 4]]),
            min_tokens=rng.choice([0, 1]),
            output_kind=rng.choice(list(RequestOutputKind)),
        )
        return [rng.randrange(3, VOCAB) for _ in range(length)], params

    def take(self, outputs: list) -> None:
        for output in outputs:
            name = output.request_id
            completion = output.outputs[0]
            delta = self.requests[name][1].output_kind is RequestOutputKind.DELTA
            self.tokens[name] = self.tokens[name] * delta + completion.token_ids
            if output.finished:
                assert name not in self.ended
                self.ended[name] = completion.finish_reason

    def go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Steps of the model fail now and then, which `step` raises, and so does the processing of one
        request's news, which ends that request.
        """
        engine = self.llm.llm_engine
        rng = self.rng
        todo = list(self.requests)
        failed = []
        core = engine.engine_core.engine_core
        runner = self.llm.collective_rpc(lambda worker: worker.model_runner)[0]

        def failing(call, chance):
            def maybe(*args):
                if rng.random() < chance:
                    failed.append(call)
                    raise RuntimeError("boom")
                return call(*args)

            return maybe

        monkeypatch.setattr(runner, "execute_model", failing(runner.execute_model, 0.01))
        monkeypatch.setattr(RequestState, "add", failing(RequestState.add, 0.005))
        while todo or engine.has_unfinished_requests():
            if todo and rng.random() < 0.5:
                name = todo.pop()
                engine.add_request(name, *self.requests[name])
            if rng.random() < 0.02:
                name = rng.choice(list(self.requests))
                engine.abort_request(name)
                self.aborted |= {name} - set(todo) - set(self.ended)
            try:
                self.take(engine.step())
            except RuntimeError:
                assert failed
            manager = core.scheduler.block_manager
            running = core.scheduler.running
            manager.check_integrity()
            assert set(manager.block_tables) == {
                seq.seq_id for group in running for seq in group.unfinished
            }
        monkeypatch.undo()
        for _ in range(2):  # tells the worker which sequences ended last, behind a step ahead
            engine.step()
        assert (
            manager.get_num_free_gpu_blocks() == manager.num_gpu_blocks
            and not runner.input_batch.slot_of
        )
        assert not engine.output_processor.request_states and not core.scheduler.seqs
        assert set(self.ended) | self.aborted == set(self.requests)
        assert ("error" in self.ended.values()) <= bool(failed)


@pytest.mark.parametrize("seed", range(8))
def test_random_loads_on_small_pools(
    folder: str, alone: LLM, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Run(folder, seed)
    with case.llm:
        case.go(monkeypatch)
    for name in set(case.ended) - case.aborted:
        prompt, params = case.requests[name]
        room = case.options["max_model_len"] - len(prompt)
        limited = replace(
            params,
            max_tokens=min(params.max_tokens or room, room),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        wanted = alone.generate(prompt, limited, use_tqdm=False)[0].outputs[0].token_ids
        got = case.tokens[name]
        # alone in a full pool it ends early
        if len(prompt) + len(got) > case.pool or case.ended[name] == "error":
            wanted = wanted[: len(got)]
        assert got == wanted, (case.options, name)
    assert sum(reason != "error" for reason in case.ended.values()) >= 3, (
        "hardly anything was tested"
    )


def test_an_output_that_could_not_be_given_is_given_next_time(
    alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = alone.llm_engine
    got = []
    failures = []
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    wanted = alone.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0].token_ids
    engine.add_request("a", [5, 6, 7], replace(params, output_kind=RequestOutputKind.DELTA))
    make_output = RequestState.make_output

    def failing(state):
        output = make_output(state)
        failures.append(len(failures) % 2 == 0)
        if failures[-1]:
            signal.raise_signal(signal.SIGINT)  # Ctrl-C
        return output

    monkeypatch.setattr(RequestState, "make_output", failing)
    while engine.has_unfinished_requests():
        try:
            for output in engine.step():
                got += output.outputs[0].token_ids
        except KeyboardInterrupt:
            pass
    assert got == wanted and sum(failures) >= 3 and not engine.output_processor.request_states


def test_after_a_failed_step_the_requests_that_waited_go_on(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    "The model raises once: the two requests that ran end with an error, the next two are answered."
    prompts = {str(i): [i + 3] * (20 + i) for i in range(4)}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    outputs = {}
    calls = []
    # on a CPU, where every step calls the method that is spoilt: test_engine has the other devices
    options = {"num_gpu_blocks_override": 64, "max_num_seqs": 2, "device": "cpu"}
    with tiny(folder, **options) as llm:
        wanted = [
            o.outputs[0].token_ids
            for o in llm.generate(list(prompts.values()), params, use_tqdm=False)
        ]
        runner = llm.collective_rpc(lambda worker: worker.model_runner)[0]
        forward = runner.model_inputs
        monkeypatch.setattr(
            runner,
            "model_inputs",
            lambda *args: forward(*args) if calls.append(1) or len(calls) != 4 else 1 / 0,
        )
        for name, prompt in prompts.items():
            llm.llm_engine.add_request(name, prompt, params)
        while llm.llm_engine.has_unfinished_requests():
            try:
                outputs |= {
                    output.request_id: output.outputs[0] for output in llm.llm_engine.step()
                }
            except ZeroDivisionError:
                assert len(calls) == 4
    assert [outputs[name].finish_reason for name in prompts] == [
        "error",
        "error",
        "length",
        "length",
    ]
    assert all("ZeroDivisionError" in outputs[name].stop_reason for name in "01")
    assert [outputs[name].token_ids for name in prompts] == [
        wanted[0][:3],
        wanted[1][:3],
        *wanted[2:],
    ]


def test_parameters_are_the_engines_own(alone: LLM) -> None:
    engine = alone.llm_engine
    tokens = []
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    wanted = alone.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0].token_ids
    engine.add_request("a", [5, 6, 7], params)
    params.max_tokens = 2
    params.temperature = 100.0
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = output.outputs[0].token_ids
    assert tokens == wanted
    params.n = 0
    with pytest.raises(ValueError, match="n=0"):
        engine.add_request("b", [5, 6, 7], params)


def test_numpy_numbers_and_huge_limits(alone: LLM) -> None:
    np = pytest.importorskip("numpy")
    params = SamplingParams(
        seed=np.int64(5), temperature=np.float32(1), max_tokens=np.int64(3), ignore_eos=True
    )
    assert (
        len(
            alone.generate([np.int64(5), np.int64(6)], params, use_tqdm=False)[0]
            .outputs[0]
            .token_ids
        )
        == 3
    )
    endless = SamplingParams(temperature=0, max_tokens=None, min_tokens=10**18, stop_token_ids=[7])
    output = alone.generate([5] * 250, endless, use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "length" and 7 not in output.token_ids


@pytest.fixture(scope="module")
def said():
    """The default model, made to say what a test wants: `said(llm, text, params)` gives the outputs
    of all steps.
    """
    # no step ahead, which would take a word of the script
    options = {"num_gpu_blocks_override": 64, "async_scheduling": False}
    with LLM(dtype="float32", **options) as llm:
        import torch

        tokenizer = llm.get_tokenizer()
        runner = llm.collective_rpc(lambda worker: worker.model_runner)[0]

        def say(text: str, params: SamplingParams) -> list:
            script = iter(tokenizer(text).input_ids)
            runner.sample = lambda batch, *_: (
                torch.tensor([next(script)] * len(batch.sample_indices), device=runner.device),
                None,
            )
            llm.llm_engine.add_request("a", [1, 2, 3], params)
            outputs = []
            while llm.llm_engine.has_unfinished_requests():
                outputs += [output.outputs[0] for output in llm.llm_engine.step()]
            return outputs

        yield say


def test_eos_ends_unless_it_is_ignored(said) -> None:
    text = "Well.<|im_end|> And then?"
    ends = said(text, SamplingParams(max_tokens=8))[-1]
    assert ends.text == "Well." and ends.finish_reason == "stop"
    goes_on = said(text, SamplingParams(max_tokens=5, ignore_eos=True))[-1]
    assert (
        goes_on.text == "Well. And then"
        and goes_on.finish_reason == "length"
        and len(goes_on.token_ids) == 5
    )


def test_stop_strings_wait_for_min_tokens(said) -> None:
    text = "one two three one two three one"
    assert said(text, SamplingParams(max_tokens=7, stop=" two"))[-1].text == "one"
    assert (
        said(text, SamplingParams(max_tokens=7, stop=" two", min_tokens=3))[-1].text
        == "one two three one"
    )


def test_half_characters_are_held_back(said) -> None:
    text = "a 👩‍🚀 in Zürich 日本"
    params = SamplingParams(max_tokens=100, stop="本", include_stop_str_in_output=True)
    pieces = [o.text for o in said(text, replace(params, output_kind=RequestOutputKind.DELTA))]
    assert (
        "".join(pieces) == text and "" in pieces and not any("\ufffd" in piece for piece in pieces)
    )


def test_truncated_prompts_keep_their_end(alone: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, truncate_prompt_tokens=3)
    output = alone.generate([9, 8, 7, 6, 5], params, use_tqdm=False)[0]
    assert output.prompt_token_ids == [7, 6, 5]


@pytest.mark.parametrize(
    "change, says",
    [
        ({"num_gpu_blocks_override": 10**9}, "num_gpu_blocks_override"),
        ({"kv_cache_memory_bytes": 1 << 50}, "kv_cache_memory_bytes"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"enable_chunked_prefill": "false"}, "enable_chunked_prefill"),
    ],
)
def test_impossible_sizes(folder: str, change: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tiny(folder, **change)
    with tiny(
        folder, num_gpu_blocks_override=64, seed=None, max_num_seqs=None, quantization=None
    ) as llm:
        assert llm.llm_engine.config.scheduler_config.max_num_seqs == 256


def test_chat_and_prompts_refuse_what_they_do_not_know(alone: LLM) -> None:
    with pytest.raises(TypeError, match="add_generation_promt"):
        alone.chat([{"role": "user", "content": "?"}], add_generation_promt=False)
    with pytest.raises(ValueError, match="multi_modal_data"):
        images = {"image": ["a.png"]}
        alone.generate({"prompt_token_ids": [5], "multi_modal_data": images}, use_tqdm=False)
