"""What crosses between the engine's two halves is data: as msgpack bytes it is the same, and so are
all answers.

The engine's tests run here once more with a client that encodes and decodes everything on its way
to the core and back: all of test_memory, test_stress and test_engine but those that send no
request, or take long and send nothing that others do not; of test_equals_transformers the tiny
models; of test_blocks random loads and the cases.
"""

import random
from functools import partialmethod
from types import ModuleType
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import test_blocks
import test_engine
import test_equals_transformers
import test_memory
import test_stress
from test_engine import smol  # noqa: F401  fixtures, as those of the next two lines
from test_memory import folder, models, poisoned, wanted  # noqa: F401
from test_stress import alone, said  # noqa: F401

from teachvllm import LLM, LLMEngine, RequestOutputKind, SamplingParams
from teachvllm.engine.core import InprocClient
from teachvllm.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from teachvllm.sampling_params import BeamSearchParams
from teachvllm.trace import StepTrace

pytestmark = pytest.mark.usefixtures("as_bytes")
CROSSINGS: list[int] = []  # the bytes of each message


def cross(message: Any, kind: Any) -> Any:
    "The message as it arrives at the other side."
    sent = msgspec.msgpack.encode(message)
    CROSSINGS.append(len(sent))
    return msgspec.msgpack.decode(sent, type=kind)


class BytesClient(InprocClient):
    "As if the core were in another process: nothing gets there, or back, but bytes."

    def add_request(self, request: EngineCoreRequest) -> None:
        super().add_request(cross(request, EngineCoreRequest))

    def abort_requests(self, aborts: list[tuple[str, int | None]]) -> None:
        super().abort_requests(cross(aborts, list[tuple[str, int | None]]))

    def get_output(self) -> EngineCoreOutputs:
        return cross(super().get_output(), EngineCoreOutputs)


@pytest.fixture(scope="module", autouse=True)
def as_bytes() -> Any:
    "Every engine that is made in this file has a `BytesClient`."
    with patch.object(
        LLMEngine, "__init__", partialmethod(LLMEngine.__init__, client_class=BytesClient)
    ):
        yield


AGAIN: dict[ModuleType, set[str]] = {  # which tests run again: all but these
    test_memory: {
        "test_refused_arguments",
        "test_refused_parameters",
        "test_default_model_with_a_long_shared_prefix",
        "test_four_samples_share_their_prompt",
        "test_a_policy_of_ones_own",
        "test_a_preempted_request_with_forks_comes_back_before_later_ones",
    },
    test_stress: {"test_impossible_sizes"},
    test_engine: {
        "test_refused_arguments",
        "test_unknown_argument_suggests_the_nearest",
        "test_missing_model",
        "test_damaged_weights",
        "test_unsupported_architecture_lists_the_supported",
        "test_formats",
        "test_memory_comes_back",
        "test_command_line",
    },
    test_equals_transformers: {"test_smollm2_in_one_batch", "test_smollm2_alone"},
    test_blocks: {
        "test_any_order_of_calls_allocator",
        "test_any_order_of_calls_manager",
        "test_any_order_of_calls_engine",
        "test_that_was_ten_thousand_operations",
        "test_two_thousand_random_requests",
    },
}

for module, left_out in AGAIN.items():
    tests = {
        name: value
        for name, value in vars(module).items()
        if name.startswith("test_") and callable(value)
    }
    assert left_out <= set(tests), f"{module.__name__} has no {left_out - set(tests)}"
    for name in sorted(set(tests) - left_out):
        globals()[f"{module.__name__}_{name.removeprefix('test_')}"] = tests[name]


@pytest.mark.parametrize("seed", range(1000, 1020))
def test_random_requests_on_a_simulated_worker(seed: int) -> None:
    rng = random.Random(seed)
    crossings = len(CROSSINGS)
    simulation = test_blocks.Simulation(**test_blocks.random_options(rng))
    assert isinstance(simulation.engine.engine_core, BytesClient)
    test_blocks.load(simulation, rng, 20)
    assert len(CROSSINGS) > crossings + 40


# The messages themselves


@pytest.mark.parametrize(
    "params, beam",
    [
        (SamplingParams(), None),
        (
            SamplingParams(
                n=2,
                best_of=5,
                temperature=0.7,
                top_p=0.9,
                top_k=7,
                min_p=0.1,
                seed=-3,
                stop=["a", "日本"],
                stop_token_ids=[1],
                ignore_eos=True,
                max_tokens=None,
                min_tokens=3,
                detokenize=True,
                skip_special_tokens=False,
                include_stop_str_in_output=True,
                truncate_prompt_tokens=9,
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
            None,
        ),
        (
            BeamSearchParams(3, 8).sampling_params(),
            BeamSearchParams(3, 8, True, length_penalty=0.5),
        ),
    ],
)
def test_a_request_arrives_as_it_was_sent(
    params: SamplingParams, beam: BeamSearchParams | None
) -> None:
    request = EngineCoreRequest("a", [1, 2, 2**31], params, 2**64 - 1, [2, 5], -7, beam)
    there = cross(request, EngineCoreRequest)
    assert (
        there == request and there is not request and type(there.sampling_params) is SamplingParams
    )
    assert (
        there.sampling_params.output_kind is params.output_kind
        and there.sampling_params.num_seqs == params.num_seqs
    )


def test_outputs_arrive_as_they_were_sent() -> None:
    news = [
        EngineCoreOutput("a", 0, [5]),
        EngineCoreOutput("b", 2, [], "stop", "END", -1.5, True, 16, 123.4567, 3),
        EngineCoreOutput("b", 1, [7, 8], "stop", 8),
    ]
    assert cross(EngineCoreOutputs(news), EngineCoreOutputs) == EngineCoreOutputs(news)
    assert len(msgspec.msgpack.encode(EngineCoreOutputs(news[:1]))) < 24, "a token is a few bytes"


def test_a_recording_crosses(folder: str) -> None:  # noqa: F811
    "Swaps, copies and forks are in it."
    requests = [
        test_memory.several(3, max_tokens=30),
        BeamSearchParams(3, 20, True),
        test_memory.several(2, max_tokens=30),
    ]
    with test_memory.tiny(folder, 20, preemption_mode="swap") as llm, llm.record() as trace:
        for i, params in enumerate(requests):
            llm.llm_engine.add_request(str(i), [5 + i] * 9, params)
        test_memory.run(llm)
    assert len(trace.steps) > 30 and all(isinstance(step, StepTrace) for step in trace.steps)
    assert all(cross(step, StepTrace) == step for step in trace.steps)
    kinds = {kind for step in trace.steps for kind, _, _ in step.block_events}
    assert kinds >= {"allocate", "share", "free", "cache", "copy", "swap_out", "swap_in"}
    assert {name for step in trace.steps for name in step.finished} >= {
        "0",
        "0.1",
        "0.2",
        "2",
        "2.1",
    }


def test_what_the_user_changes_afterwards_does_not_arrive(folder: str) -> None:  # noqa: F811
    prompt = [5, 6, 7]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop_token_ids=[3])
    with test_memory.tiny(folder) as llm:
        expected = test_memory.samples(llm, [prompt], params)[0]
        llm.llm_engine.add_request("a", prompt, params)
        prompt += [8]
        params.stop_token_ids.append(expected[0][1])
        (output,) = test_memory.run(llm).values()
        assert [output.outputs[0].token_ids] == expected


def test_a_client_of_ones_own(folder: str) -> None:  # noqa: F811
    with LLM(folder, dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=64) as llm:
        assert type(llm.llm_engine.engine_core) is BytesClient
