"""Texts that cannot be decoded, two threads that generate, and steps decided ahead while a request
is swapped out.
"""

import threading
from typing import Any

from teachvllm.config import SchedulerConfig
from teachvllm.core.block_manager import BlockSpaceManager
from teachvllm.core.extensions import LookAhead, Swapping
from teachvllm.core.scheduler import Scheduler, SchedulerOutput
from teachvllm.engine.output_processor import OutputProcessor
from teachvllm.llm import LLM
from teachvllm.messages import EngineCoreOutput, EngineCoreRequest
from teachvllm.sampling_params import RequestOutputKind, SamplingParams
from teachvllm.sequence import SequenceGroup, SequenceStatus


class PickyTokenizer:
    "Decodes ids below 100 only, as a tokenizer does whose model has a padded vocabulary."

    def decode(self, token_ids: list[int], **options: Any) -> str:
        return "".join("abcdefghij"[i % 10] for i in token_ids if i < 100 or [][i])


def test_a_text_that_cannot_be_decoded_ends_its_own_request_only() -> None:
    for more in ({}, {"stop": ["zz"]}, {"output_kind": RequestOutputKind.DELTA}):
        processor = OutputProcessor(PickyTokenizer())
        for name in ("bad", "good"):
            processor.add_request(
                EngineCoreRequest(name, [1, 2], SamplingParams(max_tokens=9, **more), seed=0), "bc"
            )
        outputs = []
        aborts = []
        for token_ids in ((3, 3), (500, 4), (5, 5)):
            news = [
                EngineCoreOutput(n, 0, [i])
                for n, i in zip(("bad", "good"), token_ids)
                if n in processor.request_states
            ]
            made, ended = processor.process_outputs(news)
            outputs = outputs + made
            aborts = aborts + ended
        [end] = [output for output in outputs if output.request_id == "bad" and output.finished]
        assert end.outputs[0].finish_reason == "error" and "IndexError" in str(
            end.outputs[0].stop_reason
        )
        texts = [output.outputs[0].text for output in outputs if output.request_id == "good"]
        assert ("".join(texts) if "output_kind" in more else texts[-1]) in (
            "def",
            "de",
        )  # a stop string holds text back
        assert list(processor.request_states) == ["good"]
        assert aborts == [("bad", None)]


def test_a_second_thread_in_generate_is_refused(folder: str) -> None:
    with LLM(folder, skip_tokenizer_init=True, dtype="float32", num_gpu_blocks_override=32) as llm:
        started = threading.Event()
        refused = []

        def slow_hook(*_: Any) -> None:
            if not started.is_set():
                started.set()
                thread.join()

        def second() -> None:
            started.wait()
            try:
                llm.generate([1, 2], SamplingParams(max_tokens=2), use_tqdm=False)
            except ValueError as error:
                refused.append(str(error))

        thread = threading.Thread(target=second)
        thread.start()
        llm.collective_rpc(
            lambda worker: worker.model_runner.model.register_forward_pre_hook(slow_hook)
        )
        [output] = llm.generate(
            [[3, 4]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False
        )
        assert len(output.outputs[0].token_ids) == 3 and "another thread" in refused[0]
        assert llm.generate([5], SamplingParams(max_tokens=1), use_tqdm=False)[0].finished


def test_no_step_ahead_while_a_swapped_request_outranks_a_running_one() -> None:
    manager = BlockSpaceManager(4, 8, 8)
    config = SchedulerConfig(max_model_len=64, policy="priority")
    scheduler = Scheduler(config, manager, Swapping(manager, "swap"))

    def add(name: str, priority: int, num_tokens: int = 8) -> SequenceGroup:
        group = SequenceGroup(
            name, scheduler.make_seq([1] * num_tokens, 0, 40), SamplingParams(), priority=priority
        )
        scheduler.add_request(group)
        return group

    high = add("high", 0)
    scheduler.schedule()
    scheduler._preempt(high, SchedulerOutput())
    assert high.status is SequenceStatus.SWAPPED
    low = SequenceGroup("low", scheduler.make_seq([1] * 8, 0, 40), SamplingParams(), priority=5)
    scheduler.add_request(low)
    scheduler.swapped.remove(high)  # hidden for one step, so that the other one runs
    look_ahead = LookAhead(scheduler)
    look_ahead.expect(scheduler.schedule())
    scheduler.swapped.add(high)
    add("waits", 9, num_tokens=28)
    assert low.status is SequenceStatus.RUNNING and scheduler.waiting.peek().request_id == "waits"  # type: ignore[union-attr]
    assert not look_ahead.can_run_ahead()
