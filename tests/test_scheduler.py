"""What the scheduler decides, on the simulated worker of `test_blocks`: windows and forks,
priorities, a full pool.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from test_blocks import Simulation, load, random_options, with_tokens

from teachvllm.config import SchedulerConfig
from teachvllm.core.block_manager import NULL_BLOCK, AllocStatus, BlockSpaceManager
from teachvllm.core.extensions import LookAhead, ParallelSampling
from teachvllm.core.orders import SchedulerOutput
from teachvllm.core.scheduler import Scheduler
from teachvllm.messages import EngineCoreRequest, ModelRunnerOutput
from teachvllm.sampling_params import BeamSearchParams, SamplingParams
from teachvllm.sequence import Sequence, SequenceGroup

# A window, and requests of several sequences that are computed again


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [6, 16, 64])
@pytest.mark.parametrize("num_cpu_blocks, mode", [(0, None), (1, None), (40, "recompute")])
@pytest.mark.parametrize("num_prompt, num_blocks", [(9, 9), (60, 9), (60, 12), (3, 40)])
def test_several_sequences_with_a_window_do_not_end_early(
    num_prompt: int,
    num_blocks: int,
    mode: str | None,
    num_cpu_blocks: int,
    budget: int,
    caching: bool,
) -> None:
    """Of each the pool holds only what its window sees: preempted, they are computed again to their
    last token.
    """
    simulation = Simulation(
        window=8,
        num_gpu_blocks=num_blocks,
        num_cpu_blocks=num_cpu_blocks,
        preemption_mode=mode,
        policy="priority",
        max_model_len=128,
        max_num_batched_tokens=budget,
        caching=caching,
    )
    prompt = [i % 5 for i in range(num_prompt)]
    samples = simulation.add(prompt, with_tokens(30, n=3), 2)
    beams = simulation.add([*prompt, 1], BeamSearchParams(3, 30, True), 2)
    assert samples and beams
    for i in range(120):
        simulation.step()
        if i % 12 == 11:
            simulation.add([3] * 20, with_tokens(4), 1)
    simulation.finish()
    assert num_blocks > 12 or {samples, beams} & set(simulation.preempted), "nothing was tested"
    assert [len(tokens) for tokens in simulation.told[samples]] == [30] * 3
    assert [len(tokens) for tokens in simulation.told[beams]] == [30] * 3


@pytest.mark.parametrize("seed", range(30))
def test_random_requests_with_a_window_and_no_place_to_swap(seed: int) -> None:
    rng = random.Random(1000 + seed)
    options = random_options(rng) | {"window": rng.choice([1, 2, 3, 5, 8, 11]), "num_cpu_blocks": 0}
    load(Simulation(**options), rng, 20)


def test_a_prompt_is_refused_only_if_its_window_does_not_fit() -> None:
    """Two answers to a prompt that is five times the pool; a window that ends with a block needs no
    block more.
    """
    assert Simulation(window=8, num_gpu_blocks=4, max_model_len=128).add(
        [1] * 80, with_tokens(5, n=2)
    )
    assert not Simulation(window=8, num_gpu_blocks=3, max_model_len=128).add(
        [1] * 80, with_tokens(5, n=2)
    )
    simulation = Simulation(window=5, num_gpu_blocks=2, max_model_len=128)
    name = simulation.add([1] * 80, with_tokens(5))
    simulation.finish()
    assert len(simulation.told[name][0]) == 5


# Priorities


def test_none_is_preempted_in_vain_for_a_request_that_shares_its_blocks() -> None:
    """Blocks that both have are free when the lower one is gone, or in use while it is there: not
    both at once.
    """
    # 12 blocks
    simulation = Simulation(
        policy="priority", max_num_batched_tokens=64, preemption_mode="recompute"
    )
    simulation.add([1] * 4, with_tokens(4), 0)  # two blocks
    simulation.step()
    lower = simulation.add([2] * 16, with_tokens(4), 2)  # five
    simulation.step()
    # eleven, of which it shares four
    higher = simulation.add([2] * 16 + [3] * 26, with_tokens(1), 1)
    simulation.step()
    assert (
        higher in {group.request_id for group in simulation.scheduler.waiting}
        and lower not in simulation.preempted
    )
    simulation.finish()


def test_blocks_about_to_be_freed_are_not_in_use() -> None:
    manager = BlockSpaceManager(4, 8, enable_caching=True)
    groups = [
        SequenceGroup(str(i), Sequence(i, [0] * n), SamplingParams())
        for i, n in enumerate((4, 17, 20))
    ]
    for group in groups[:2]:
        manager.allocate(group.first_seq)
        group.first_seq.num_computed_tokens = group.first_seq.get_len()
        manager.cache_full_blocks(group.first_seq)
    freed = manager.get_freed_blocks(groups[1:2])
    # block 0 is in both
    assert len(freed) == 4 and manager.get_freed_blocks(groups[:2]) == {0, *freed}
    assert manager.num_needed_blocks(groups[2]) == (5, 1) and manager.num_needed_blocks(
        groups[2], freed
    ) == (5, 4)
    assert manager.can_allocate(groups[2], headroom=4, freed=freed) is AllocStatus.LATER


# Prompts that share a step


def prompt_tokens(simulation: Simulation, name: str) -> int:
    "How many tokens of its prompt are computed."
    groups = simulation.scheduler.groups
    return groups[name].first_seq.num_computed_tokens if name in groups else 10**9


def test_short_prompts_overtake_a_second_long_one() -> None:
    """Two prompts at a time, one of them long: the second long one waits, and shorter ones that
    came later are computed beside the first. vLLM: `test_short_prompts_jump_long_prompts`.
    """
    options = {
        "num_gpu_blocks": 200,
        "num_cpu_blocks": 0,
        "max_model_len": 200,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 8,
        "caching": False,
    }
    simulation = Simulation(
        **options,
        max_num_partial_prefills=2,
        max_long_partial_prefills=1,
        long_prefill_token_threshold=20,
    )
    long, second = (simulation.add([i] * 100, with_tokens(2), 0) for i in (1, 2))
    short = simulation.add([3] * 12, with_tokens(2), 0)
    simulation.step()
    assert prompt_tokens(simulation, long) == 8 == prompt_tokens(simulation, short)
    assert prompt_tokens(simulation, second) == 0
    simulation.step()
    assert prompt_tokens(simulation, short) >= 12 and prompt_tokens(simulation, second) == 0
    simulation.finish()
    plain = Simulation(**options)
    long, second = (plain.add([i] * 100, with_tokens(2), 0) for i in (1, 2))
    short = plain.add([3] * 12, with_tokens(2), 0)
    for _ in range(6):
        plain.step()
    assert prompt_tokens(plain, long) == 96 and prompt_tokens(plain, short) == 0


@pytest.mark.parametrize("seed", range(20))
def test_random_requests_whose_prompts_share_a_step(seed: int) -> None:
    rng = random.Random(2000 + seed)
    most = rng.choice([1, 2, 3])
    options = random_options(rng) | {
        "chunked": True,
        "max_num_partial_prefills": most,
        "max_long_partial_prefills": rng.randint(1, most),
        "long_prefill_token_threshold": rng.choice([0, 1, 3, 10]),
    }
    load(Simulation(**options), rng, 20)


def test_a_threshold_bounds_each_chunk() -> None:
    simulation = Simulation(
        num_gpu_blocks=100, max_model_len=100, long_prefill_token_threshold=5, caching=False
    )
    name = simulation.add([1] * 23, with_tokens(1), 0)
    chunks = []
    while name not in simulation.reasons:
        before = prompt_tokens(simulation, name)
        simulation.step()
        chunks.append(min(prompt_tokens(simulation, name), 23) - before)
    assert chunks == [5, 5, 5, 5, 3]
    simulation.finish()


# Drafts of a group's sequences, and what else may go wrong beside them


def forked(num_blocks: int, num_prompt: int, budget: int = 64) -> tuple[Scheduler, list[Sequence]]:
    "A scheduler with one request of two sequences, which both decode."
    config = SchedulerConfig(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=budget)
    scheduler = Scheduler(config, BlockSpaceManager(4, num_blocks, watermark=0))
    seq = scheduler.make_seq([1] * num_prompt, seed=0, max_len=60)
    group = SequenceGroup("a", seq, SamplingParams(n=2), num_seqs=2, num_samples=2)
    group.fork_rule = ParallelSampling()
    scheduler.add_request(group)
    while scheduler.seqs and len(group.seqs) == 1:
        out = scheduler.schedule()
        done = seq.num_new_tokens == 0
        scheduler.update_from_output(
            ModelRunnerOutput(*(([0, 0], [[2], [3]]) if done else ([], [])))
        )
        assert out.num_scheduled_tokens
    return scheduler, group.unfinished


@pytest.mark.parametrize("num_blocks", range(3, 8))
@pytest.mark.parametrize("num_prompt", range(3, 9))
@pytest.mark.parametrize("drafts", [{0: 6}, {1: 6}, {0: 3, 1: 9}])
def test_drafts_take_no_block_that_a_sibling_needs(
    num_blocks: int, num_prompt: int, drafts: dict[int, int]
) -> None:
    "Step after step, with drafts that are all wrong, until both have ended."
    try:
        scheduler, seqs = forked(num_blocks, num_prompt)
    except ValueError as error:
        assert "needs" in str(error) and "blocks" in str(error)
        return
    while scheduler.has_unfinished_requests():
        ids = [seq.seq_id for seq in seqs]
        scheduler.update_draft_token_ids(
            {ids[i]: [7] * n for i, n in drafts.items() if i < len(ids)}
        )
        out = scheduler.schedule()
        scheduler.block_manager.check_integrity()
        live = [i for i in out.num_scheduled_tokens if i in scheduler.seqs]
        scheduler.update_from_output(ModelRunnerOutput(live, [[5]] * len(live)))
    assert scheduler.block_manager.get_num_free_gpu_blocks() == num_blocks


def test_drafts_leave_a_token_to_each_sequence() -> None:
    "A budget of four, two sequences with three drafts each: both get on in every step."
    scheduler, seqs = forked(num_blocks=40, num_prompt=6, budget=4)
    for _ in range(6):
        scheduler.update_draft_token_ids({seq.seq_id: [7, 8, 9] for seq in seqs})
        out = scheduler.schedule()
        assert set(out.num_scheduled_tokens) == {seq.seq_id for seq in seqs}
        assert out.total_num_scheduled_tokens == 4
        scheduler.update_from_output(ModelRunnerOutput([seq.seq_id for seq in seqs], [[5], [5]]))


def test_a_grammar_that_fails_ends_its_request_only() -> None:
    class Broken:
        def bitmask(self, output_token_ids: list[int], drafts: list[int]) -> list[bytes]:
            raise RuntimeError("no state left")

    scheduler = Scheduler(SchedulerConfig(64), BlockSpaceManager(4, 20))
    for name in ("sound", "broken"):
        group = SequenceGroup(name, scheduler.make_seq([1] * 5, 0, max_len=7), SamplingParams())
        group.grammar = Broken() if name == "broken" else None
        scheduler.add_request(group)
    outputs = []
    while scheduler.has_unfinished_requests():
        live = [i for i in scheduler.schedule().num_scheduled_tokens if i in scheduler.seqs]
        outputs += scheduler.update_from_output(ModelRunnerOutput(live, [[5]] * len(live)))
    ends = {one.request_id: one for one in outputs if one.finish_reason}
    assert ends["sound"].finish_reason == "length"
    assert ends["broken"].finish_reason == "error" and "no state left" in ends["broken"].stop_reason
    assert scheduler.block_manager.get_num_free_gpu_blocks() == 20


def test_what_becomes_ready_does_not_preempt_a_request_in_flight() -> None:
    class ReadyAt:
        name = "grammar"
        polls = 3

        def is_ready(self) -> bool:
            self.polls -= 1
            return self.polls <= 0

    config = SchedulerConfig(64, max_num_seqs=1, policy="priority")
    scheduler = Scheduler(config, BlockSpaceManager(4, 20))
    look_ahead = LookAhead(scheduler)
    for name, priority in (("low", 1), ("high", 0)):
        group = SequenceGroup(name, scheduler.make_seq([1] * 5, 0, max_len=20), SamplingParams())
        group.priority = priority
        group.prerequisites = [ReadyAt()] if name == "high" else []
        scheduler.add_request(group)
    in_flight: list[SchedulerOutput] = []
    ended = set()
    ahead_of_high = 0
    while scheduler.has_unfinished_requests():
        scheduler.queue_ready_requests()
        if not in_flight:
            in_flight.append(scheduler.schedule())
            look_ahead.expect(in_flight[-1])
        if look_ahead.can_run_ahead():
            ahead = scheduler.schedule()
            assert not ahead.preempted_request_ids
            ahead_of_high += len(scheduler.not_ready)
            look_ahead.expect(ahead)
            in_flight.append(ahead)
        out = in_flight.pop(0)
        done = [i for i in out.num_scheduled_tokens if i in scheduler.seqs]
        outputs = scheduler.update_from_output(ModelRunnerOutput(done, [[5]] * len(done)))
        ended |= {one.request_id for one in outputs if one.finish_reason}
    assert ended == {"low", "high"} and ahead_of_high == 2


# A full pool


def test_blocks_promised_to_a_prompt_are_not_taken_behind_it() -> None:
    """With a window a prompt gets its blocks chunk by chunk: the first request gets one in every
    step.
    """
    simulation = Simulation(
        window=48,
        num_gpu_blocks=21,
        num_cpu_blocks=0,
        policy="priority",
        max_num_batched_tokens=6,
        max_model_len=100,
        caching=False,
    )
    for i, length in enumerate((6, 1, 4)):
        simulation.add([i] * length, with_tokens(30), 1)
    for _ in range(7):
        simulation.step()
    name = simulation.add([5] * 40, with_tokens(2), 0)
    seq = simulation.scheduler.groups[name].first_seq
    while name not in simulation.reasons:
        before = seq.num_computed_tokens
        simulation.step()
        assert seq.num_computed_tokens > before or name in simulation.reasons, (
            "the first request waits for a block"
        )
    assert simulation.preempted
    simulation.finish()


# Drafts and partial prefills, beside a worker whose every token is a 5


def add_request(
    scheduler: Scheduler, name: str, prompt: list[int], max_len: int, priority: int = 0
) -> SequenceGroup:
    group = SequenceGroup(name, scheduler.make_seq(prompt, 0, max_len), SamplingParams())
    group.priority = priority
    scheduler.add_request(group)
    return group


def run_step(scheduler: Scheduler, draft: list[int] | None = None) -> SchedulerOutput:
    "One step; where `draft` is given, each sequence gets it before, and 5s in it are right."
    if draft:
        scheduler.update_draft_token_ids(dict.fromkeys(scheduler.seqs, draft))
    out = scheduler.schedule()
    seq_ids = [i for i in out.num_scheduled_tokens if scheduler.seqs[i][1].num_new_tokens <= 0]
    sampled = []
    for seq_id in seq_ids:
        drafts = out.scheduled_spec_decode_tokens.get(seq_id, [])
        right = next((i for i, token_id in enumerate(drafts) if token_id != 5), len(drafts))
        sampled.append([5] * (right + 1))
    scheduler.update_from_output(ModelRunnerOutput(seq_ids, sampled))
    scheduler.block_manager.check_integrity()
    return out


def test_a_sequence_has_hashes_of_its_own_tokens_only() -> None:
    "Also where its sibling is longer, as it is after drafts of the sibling's that were right."
    manager = BlockSpaceManager(4, 20, enable_caching=True)
    longer = Sequence(0, list(range(13)))
    group = SequenceGroup("a", longer, SamplingParams(n=2))
    shorter = group.fork(longer, 1)
    shorter.token_ids = list(range(10))
    assert manager.num_needed_blocks(group) == (3 + 2, 3 + 2)
    assert len(longer.block_hashes) == 3 and shorter.block_hashes == longer.block_hashes[:2]
    shorter.token_ids += [77, 78, 79]
    manager.num_needed_blocks(group)
    assert shorter.block_hashes[2] != longer.block_hashes[2]


@pytest.mark.parametrize("num_drafts", [1, 5, 9])
def test_drafts_that_were_right_leave_a_windows_blocks(num_drafts: int) -> None:
    "What is behind the window then is free in the next step: no answer ends early for it."
    scheduler = Scheduler(
        SchedulerConfig(64, 1, 32), BlockSpaceManager(4, 4, window=8, watermark=0)
    )
    group = add_request(scheduler, "a", [1, 2, 3, 4, 5], 50)
    for _ in range(60):
        run_step(scheduler, [5] * num_drafts)
    assert group.first_seq.get_len() == 50 and not scheduler.has_unfinished_requests()


def test_drafts_that_were_wrong_keep_no_blocks() -> None:
    scheduler = Scheduler(SchedulerConfig(200, 2, 64), BlockSpaceManager(4, 40))
    seq = add_request(scheduler, "a", [1, 2, 3], 150).first_seq
    for _ in range(20):
        run_step(scheduler, [5, 5, *[6] * 9])
        assert len(scheduler.block_manager.block_tables[seq.seq_id]) == -(-seq.get_len() // 4)
    assert seq.get_len() > 40


def test_drafts_do_not_starve_prompts() -> None:
    "A running prompt, and one that waits: both go on where drafts could fill each step."
    scheduler = Scheduler(SchedulerConfig(4000, 8, 32), BlockSpaceManager(16, 2000))
    for i in range(6):
        add_request(scheduler, str(i), [i] * 2, 3000)
    run_step(scheduler)
    prompt = add_request(scheduler, "prompt", list(range(1000)), 1010)
    waiting = add_request(scheduler, "waiting", [7] * 10, 20)
    for _ in range(100):
        out = run_step(scheduler, [5, 5, 5, 5])
    assert prompt.is_finished() and waiting.is_finished()
    assert all(num == 5 for num in out.num_scheduled_tokens.values())  # no prompt: all drafts


def partial_prefills(**options: int) -> Scheduler:
    config = SchedulerConfig(4000, policy="priority", **options)
    return Scheduler(config, BlockSpaceManager(16, 2000))


def test_none_is_preempted_for_a_prompt_that_may_not_begin() -> None:
    scheduler = partial_prefills(
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_num_partial_prefills=2,
        long_prefill_token_threshold=20,
    )
    low = add_request(scheduler, "low", [1] * 10, 2000, priority=5)
    run_step(scheduler)
    add_request(scheduler, "long", list(range(1000)), 1010)
    run_step(scheduler)
    second = add_request(scheduler, "second long", list(range(1000, 2000)), 1010)
    for _ in range(30):
        run_step(scheduler)
    assert low.num_preemptions == 0 and second.first_seq.num_computed_tokens == 0


def test_prompts_that_may_not_begin_have_no_share() -> None:
    scheduler = partial_prefills(
        max_num_seqs=8, max_num_batched_tokens=64, max_num_partial_prefills=4
    )
    for i in range(4):  # one of them at a time
        add_request(scheduler, str(i), list(range(1000)), 1010)
    assert run_step(scheduler).total_num_scheduled_tokens == 64


def test_right_drafts_before_a_nan_stand() -> None:
    scheduler = Scheduler(SchedulerConfig(100, 8, 32), BlockSpaceManager(4, 20))
    add_request(scheduler, "a", [1] * 5, 50)
    run_step(scheduler)
    scheduler.update_draft_token_ids({0: [4, 5, 6]})
    scheduler.schedule()
    outputs = scheduler.update_from_output(ModelRunnerOutput([0], [[4, 5, -1]]))
    assert [output.new_token_ids for output in outputs] == [[4, 5], []]
    assert outputs[-1].finish_reason == "error" and not scheduler.has_unfinished_requests()


@pytest.mark.parametrize("masks", [[], [b"\xff" * 4] * 2, [b"\xff" * 3]])
def test_masks_of_another_number_or_size_end_their_request_only(masks: list[bytes]) -> None:
    scheduler = Scheduler(SchedulerConfig(100, 8, 32), BlockSpaceManager(4, 20))
    scheduler.builder.mask_size = 4
    good = add_request(scheduler, "good", [1] * 5, 50)
    bad = add_request(scheduler, "bad", [2] * 5, 50)
    bad.grammar = SimpleNamespace(bitmask=lambda *_: masks)
    for _ in range(3):
        run_step(scheduler)
    assert bad.is_finished() and good.first_seq.get_len() == 8


@pytest.mark.parametrize("chunked", [True, False])
def test_nothing_is_preempted_for_a_prompt_that_the_step_has_no_tokens_for(chunked: bool) -> None:
    "Without chunks 60 tokens need a step that 20 others leave 44 of: the last request goes on."
    config = SchedulerConfig(64, 21, 64, enable_chunked_prefill=chunked, policy="priority")
    scheduler = Scheduler(config, BlockSpaceManager(4, 4000))
    for i in range(20):
        add_request(scheduler, str(i), [i] * 2, max_len=20)
    low = add_request(scheduler, "low", [9] * 4, max_len=60, priority=5)
    run_step(scheduler)
    high = add_request(scheduler, "high", list(range(60)), max_len=62, priority=1)
    while not high.is_finished():
        out = run_step(scheduler)
        admitted = high.num_cached_tokens is not None
        assert low.is_finished() or low.first_seq.seq_id in out.num_scheduled_tokens or admitted
    assert low.num_preemptions == int(chunked)


def test_drafts_do_not_starve_a_prompt_that_must_fit_into_a_step() -> None:
    config = SchedulerConfig(64, 8, 64, enable_chunked_prefill=False)
    scheduler = Scheduler(config, BlockSpaceManager(4, 400))
    for i in range(6):
        add_request(scheduler, str(i), [i] * 2, max_len=60)
    run_step(scheduler)
    prompt = add_request(scheduler, "prompt", list(range(50)), max_len=52)
    for _ in range(2):
        run_step(scheduler, draft=[6] * 8)
    assert prompt.is_finished()


@pytest.mark.parametrize("waiting", [10, 3000])
def test_not_more_prompts_are_looked_at_than_can_run(waiting: int) -> None:
    config = SchedulerConfig(
        64, max_num_seqs=4, max_num_partial_prefills=3, long_prefill_token_threshold=8
    )
    scheduler = Scheduler(config, BlockSpaceManager(4, 400))
    for i in range(waiting):
        add_request(scheduler, str(i), [i] * 30, max_len=40)
    seen = []
    is_long = scheduler.prefills.is_long
    scheduler.prefills.is_long = lambda group: seen.append(group) or is_long(group)  # type: ignore
    run_step(scheduler)
    assert len(set(seen)) <= 2 * config.max_num_seqs


def test_one_request_of_several_sequences_costs_the_others_nothing() -> None:
    "While there are free blocks enough, no group is asked what it needs."
    scheduler, _ = forked(num_blocks=400, num_prompt=6)
    for i in range(8):
        add_request(scheduler, f"more {i}", [i] * 5, max_len=30)
    run_step(scheduler)
    asked = []
    scheduler.preemption.num_blocks_to_go_on = lambda group: asked.append(group) or 0  # type: ignore
    assert scheduler.preemption.all_fit() and not asked


def test_a_step_is_decided_ahead_beside_a_request_that_cannot_fit() -> None:
    "A more important request waits for one that it may not preempt: the others run ahead meanwhile."
    config = SchedulerConfig(64, policy="priority")
    scheduler = Scheduler(config, BlockSpaceManager(4, 20, watermark=0))
    add_request(scheduler, "first", [1] * 40, max_len=60)
    add_request(scheduler, "low", [2] * 5, max_len=30, priority=2)
    run_step(scheduler)
    add_request(scheduler, "high", [3] * 50, max_len=60, priority=1)
    look_ahead = LookAhead(scheduler)
    look_ahead.expect(scheduler.schedule())
    assert look_ahead.can_run_ahead()
    assert not scheduler.schedule().preempted_request_ids


def test_a_fault_in_a_rule_ends_its_request_only() -> None:
    class Broken(ParallelSampling):
        def seq_ended(self, *args: Any) -> None:
            raise RuntimeError("no rule for that")

    scheduler = Scheduler(SchedulerConfig(64), BlockSpaceManager(4, 4, watermark=0))
    group = add_request(scheduler, "0", [1] * 13, max_len=40)
    run_step(scheduler)
    group.fork_rule = Broken()
    group.first_seq.token_ids += [5] * 3  # four blocks are not enough for the next
    group.first_seq.num_computed_tokens = 16
    scheduler.schedule()
    ends = scheduler.reports.take()
    assert [one.request_finished for one in ends] == [True] and not scheduler.groups


def test_a_rule_that_fails_after_its_last_report_reports_no_second_end() -> None:
    class Broken(ParallelSampling):
        def extend(self, scheduler: Scheduler, *args: Any) -> None:
            super().extend(scheduler, *args)
            raise RuntimeError("too late")

    scheduler = Scheduler(SchedulerConfig(64), BlockSpaceManager(4, 8))
    group = add_request(scheduler, "0", [1] * 4, max_len=5)
    group.fork_rule = Broken()
    (seq_id,) = scheduler.schedule().num_scheduled_tokens
    ends = scheduler.update_from_output(ModelRunnerOutput([seq_id], [[5]]))
    assert [one.finish_reason for one in ends] == ["length"] and not scheduler.groups


@pytest.mark.parametrize("seed", range(300))
def test_the_longest_cached_prefix_with_a_window(seed: int) -> None:
    "Against the plain search, which tries each end with each block that its window needs."
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4])
    manager = BlockSpaceManager(
        size, 99, window=rng.choice([1, 2, 3, 5, 8, 11]), enable_caching=True
    )
    share = rng.choice([0.1, 0.5, 0.9])
    cached = [i if rng.random() < share else None for i in range(rng.randint(0, 14))]
    manager.prefix_cache.find = lambda seq, num_tokens: iter(cached)  # type: ignore
    expected: list[int | None] = []
    for end in range(len(cached), 0, -1):
        behind = manager.num_skipped_blocks(end * size)
        if end > behind and None not in cached[behind:end]:
            expected = [NULL_BLOCK] * behind + cached[behind:end]
            break
    assert manager.get_computed_blocks(Sequence(0, [1] * 60)) == expected


# Several schedulers


def test_an_end_is_heard_at_once_whatever_other_schedulers_do() -> None:
    "Two stages: a request that fails on one scheduler, while the other's writes a long answer."

    class Broken:
        name = "grammar"

        def is_ready(self) -> bool:
            raise ValueError("no such rule")

    def prepare(request: EngineCoreRequest, group: SequenceGroup) -> None:
        if request.request_id == "broken":
            group.prerequisites = [Broken()]

    core = Simulation(pipeline_parallel_size=2).core
    core.preparers.append(prepare)
    for name in ("long", "broken"):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        core.add_request(EngineCoreRequest(name, [1, 2, 3], params, seed=0))
    heard = [one for _ in range(2) for one in core.step().outputs if one.finish_reason]
    assert [(one.request_id, one.finish_reason) for one in heard] == [("broken", "error")]
