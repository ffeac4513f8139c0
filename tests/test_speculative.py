"""Speculative decoding: whatever is guessed, the text is what it would have been, seeds included."""

import random
from typing import Any

import pytest
from helpers import make_tiny

from teachvllm import LLM, BeamSearchParams, SamplingParams
from teachvllm.block_player import block_player
from teachvllm.config import NotSupportedYet, SpeculativeConfig
from teachvllm.core.orders import SchedulerOutput
from teachvllm.messages import ModelRunnerOutput
from teachvllm.speculative.policy import BatchCosts, DraftPolicy
from teachvllm.trace import Trace
from teachvllm.worker.model_runner import DraftStep, Proposer

LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "skip_tokenizer_init": True,
    "block_size": 4,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks_override": 200,
}
TRUE: dict[tuple[int, ...], list[int]] = {}  # a prompt -> its whole text


class Oracle(Proposer):
    "Knows the text, and says a wrong token now and then."

    wrong = 0.3
    rng = random.Random(0)

    def propose(self, step: DraftStep) -> list[list[int]]:
        found = []
        for known, most in zip(step.token_ids, step.num_drafts, strict=True):
            text = next(
                (t for p, t in TRUE.items() if tuple(known[: len(p)].tolist()) == p), known.tolist()
            )
            drafts = text[len(known) : len(known) + self.rng.randint(0, most)]
            found.append([x if self.rng.random() > self.wrong else 7 for x in drafts])
        return found


class Broken(Proposer):
    def propose(self, step: DraftStep) -> list[list[int]]:
        return [[10**9, -5, 3] for _ in step.seq_ids]


def speculate(
    method: str = "custom_class", model: str | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "method": method,
        "model": model,
        "num_speculative_tokens": 4,
        "adaptive": False,
        **more,
    }


def make(folder: str, **more: Any) -> LLM:
    return LLM(folder, **{**LIMITS, **more})


def policy_of(llm: LLM) -> DraftPolicy:
    policy = llm.llm_engine.engine_core.engine_core.draft_policy
    assert isinstance(policy, DraftPolicy)
    return policy


def worker_of(llm: LLM) -> Any:
    [worker] = llm.collective_rpc(lambda worker: worker)
    return worker


def random_requests(rng: random.Random, number: int) -> list[tuple[list[int], SamplingParams]]:
    "Prompts in which things repeat, with all kinds of parameters."
    requests = []
    for _ in range(number):
        part = [rng.randrange(128) for _ in range(rng.randint(1, 6))]
        prompt = part * rng.randint(1, 4) + [rng.randrange(128) for _ in range(rng.randint(1, 9))]
        params: dict[str, Any] = {"max_tokens": rng.randint(1, 20), "seed": rng.randrange(10**6)}
        kind = rng.random()
        if kind < 0.4:
            params["temperature"] = 0
        elif kind < 0.7:
            params |= {"temperature": 0.8, "top_p": 0.9, "top_k": rng.choice([0, 5])}
        if rng.random() < 0.15:
            params["repetition_penalty"] = 1.3
        if rng.random() < 0.15:
            params["n"] = 2
            params["temperature"] = 0.9
        if rng.random() < 0.2:
            params["logprobs"] = 2
        if rng.random() < 0.2:
            params |= {"stop_token_ids": [rng.randrange(128) for _ in range(20)], "min_tokens": 1}
        requests.append((prompt, SamplingParams(**params)))
    return requests


def answers(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[Any]:
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    outputs = llm.generate(prompts, [params for _, params in requests], use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        TRUE[tuple(prompt["prompt_token_ids"])] = [
            *prompt["prompt_token_ids"],
            *output.outputs[0].token_ids,
        ]
    return [
        [
            (
                tuple(one.token_ids),
                one.finish_reason,
                one.stop_reason,
                one.logprobs and [sorted(scores) for scores in one.logprobs],
            )
            for one in output.outputs
        ]
        for output in outputs
    ]


WORLDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 9},
    "few_blocks": {"num_gpu_blocks_override": 34},
    "swap": {"num_gpu_blocks_override": 34, "preemption_mode": "swap", "swap_space": 0.01},
    "eager": {"enforce_eager": True, "enable_prefix_caching": False},
    "ahead": {"async_scheduling": True},
}
METHODS: dict[str, dict[str, Any]] = {
    "oracle": speculate(model="test_speculative.Oracle"),
    "broken": speculate(model="test_speculative.Broken"),
    "self_quantized": speculate("self_quantized"),
    "ngram": speculate("ngram", prompt_lookup_min=1, prompt_lookup_max=3),
    "adaptive": speculate(model="test_speculative.Oracle", adaptive=True),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("method", METHODS)
def test_no_token_changes(folder: str, method: str, world: str) -> None:
    "Greedy and sampled, whole and in chunks, preempted, swapped, forked, with penalties."
    rng = random.Random(f"{method} {world}")
    requests = random_requests(rng, 24)
    expected = answers(make(folder, **WORLDS[world]), requests)
    llm = make(folder, **WORLDS[world], speculative_config=METHODS[method])
    assert answers(llm, requests) == expected
    stats = policy_of(llm).stats
    if method in ("oracle", "self_quantized", "ngram"):
        assert stats.num_accepted_tokens > 0
        assert stats.num_accepted_tokens_per_pos[0] >= stats.num_accepted_tokens_per_pos[-1]
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    free = scheduler.block_manager.get_num_free_gpu_blocks()
    assert free == scheduler.block_manager.num_gpu_blocks


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["itself", "another"])
def test_a_draft_model(folder: str, tmp_path: Any, kind: str, world: str) -> None:
    "With places of its own in the cache. The target as its own draft is always right."
    draft = folder
    if kind == "another":
        make_tiny("llama", tmp_path, layers=1)
        draft = str(tmp_path)
    requests = random_requests(random.Random(f"{kind} {world}"), 24)
    if kind == "itself":  # a draft model knows nothing of penalties
        requests = [one for one in requests if one[1].repetition_penalty == 1]
    expected = answers(make(folder, **WORLDS[world]), requests)
    llm = make(folder, **WORLDS[world], speculative_config=speculate("draft_model", draft))
    sizes = []
    run = worker_of(llm).model_runner.proposer.drafter._run_model

    def watch(batch: Any, *others: Any) -> Any:
        sizes.append(len(batch.positions))
        return run(batch, *others)

    worker_of(llm).model_runner.proposer.drafter._run_model = watch
    assert answers(llm, requests) == expected
    # a text is caught up with in pieces
    most = WORLDS[world].get("max_num_batched_tokens", LIMITS["max_num_batched_tokens"])
    assert 8 < max(sizes) <= most
    stats = policy_of(llm).stats
    assert stats.num_drafts > 0
    if kind == "itself":
        assert stats.acceptance == 1


def test_a_draft_model_of_another_vocabulary_is_refused(folder: str, tmp_path: Any) -> None:
    model = make_tiny("llama", tmp_path)
    model.resize_token_embeddings(130)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="same vocabulary size: 130 and 128"):
        make(folder, speculative_config=speculate("draft_model", str(tmp_path)))


@pytest.mark.parametrize(
    "config, says",
    [
        ({"num_speculative_tokens": 3}, "without speculative model"),
        ({"method": "ngram"}, "num_speculative_tokens must be provided"),
        (speculate("ngram", prompt_lookup_min=0, prompt_lookup_max=2), "must be > 0"),
        (speculate("ngram", disable_by_batch_size=1), "is > 1, but got"),
        (speculate("draft_model", "x", draft_tensor_parallel_size=3), "cannot be other value"),
        (speculate("medusa"), "not in teachvllm yet"),
        (speculate("custom_class", "nowhere.Mine"), "names no class"),
        (speculate("custom_class"), "needs model"),
        (speculate("ngram", num_tokens=3), "no argument `num_tokens`"),
        ("ngram", "must be a dict"),
    ],
)
def test_what_is_refused(folder: str, config: Any, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        make(folder, speculative_config=config)


def test_short_names(folder: str) -> None:
    llm = make(folder, spec_method="ngram", spec_tokens=3)
    assert policy_of(llm).most == 3
    with pytest.raises(ValueError, match="as an argument and"):
        make(folder, spec_tokens=3, speculative_config=speculate("ngram"))


def test_a_model_that_is_quantized_already(tmp_path: Any, folder: str) -> None:
    with pytest.raises(ValueError, match="wants a model with plain weights"):
        make(folder, quantization="int8", speculative_config=speculate("self_quantized"))


@pytest.mark.parametrize("method", ["ngram", "itself"])
def test_two_workers(folder: str, method: str) -> None:
    "Each proposes the same, and the draft model is cut as its target is."
    requests = random_requests(random.Random(method), 12)
    expected = answers(make(folder), requests)
    config = METHODS["ngram"] if method == "ngram" else speculate("draft_model", folder)
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with make(folder, speculative_config=config, **two) as llm:
        assert answers(llm, requests) == expected
        assert policy_of(llm).stats.num_accepted_tokens > 0


def test_two_stages(folder: str) -> None:
    "Only the last one guesses; a draft model is refused."
    requests = random_requests(random.Random(1), 12)
    expected = answers(make(folder), requests)
    two = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    with pytest.raises(NotSupportedYet, match="pipeline_parallel_size"):
        make(folder, speculative_config=speculate("draft_model", folder), **two)
    with make(folder, speculative_config=METHODS["ngram"], **two) as llm:
        assert answers(llm, requests) == expected


def test_beams_have_no_drafts(folder: str) -> None:
    prompt = {"prompt_token_ids": list(range(3, 20))}
    beam = BeamSearchParams(beam_width=3, max_tokens=6)
    plain = make(folder)
    llm = make(folder, speculative_config=METHODS["oracle"])
    wanted, got = (
        [o.token_ids for o in one.beam_search([prompt], beam)[0].outputs] for one in (plain, llm)
    )
    assert wanted == got
    assert policy_of(llm).stats.num_drafts == 0


def test_sleeps_and_wakes(folder: str) -> None:
    requests = random_requests(random.Random(2), 6)
    expected = answers(make(folder), requests)
    for method in ("self_quantized", "draft_model"):
        model = folder if method == "draft_model" else None
        llm = make(folder, speculative_config=speculate(method, model))
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert answers(llm, requests) == expected


def test_disabled_by_batch_size(folder: str) -> None:
    requests = random_requests(random.Random(3), 8)
    llm = make(folder, speculative_config=METHODS["oracle"] | {"disable_by_batch_size": 2})
    answers(llm, requests)
    policy = policy_of(llm)
    assert policy.plan(1) == (4, 1) and policy.plan(2) == (0, 0)


def test_a_step_that_fails_and_a_proposer_that_does(folder: str) -> None:
    "A proposer that raises is a fault of the step: its requests end, and the engine goes on."
    requests = random_requests(random.Random(4), 4)
    llm = make(folder, speculative_config=speculate(model="test_speculative.Raises"))
    with pytest.raises(RuntimeError, match="no idea"):
        answers(llm, requests)
    Raises.calm = True
    assert answers(llm, requests) == answers(make(folder), requests)


class Raises(Proposer):
    calm = False

    def propose(self, step: DraftStep) -> list[list[int]]:
        if not self.calm:
            raise RuntimeError("no idea")
        return [[] for _ in step.seq_ids]


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"bad_words_token_ids": [[5, 9], [11]]},
]


@pytest.mark.parametrize("world", ["plain", "chunked", "ahead"])
def test_penalties_look_at_right_drafts(folder: str, world: str) -> None:
    "Each row of a draft is shaped as if the drafts before it were written: all that are right stay."
    rng = random.Random(world)
    requests = []
    for i in range(12):
        prompt = [rng.randrange(128) for _ in range(rng.randint(2, 30))]
        chosen = dict(PENALTIES[i % 4])
        words = chosen.pop("bad_words_token_ids", None)
        params = SamplingParams(temperature=i % 2, seed=i, max_tokens=18, ignore_eos=True, **chosen)
        params.bad_words_token_ids = words
        requests.append((prompt, params))
    expected = answers(make(folder, **WORLDS[world]), requests)
    llm = make(folder, **WORLDS[world], speculative_config=speculate(model=f"{__name__}.Knows"))
    assert answers(llm, requests) == expected
    stats = policy_of(llm).stats
    assert stats.num_draft_tokens > 50 and stats.acceptance == 1


class Knows(Oracle):
    wrong = 0.0


def test_a_large_batch_asks_few_sequences_first() -> None:
    config = SpeculativeConfig("ngram", num_speculative_tokens=4)
    for right in (0, 4):
        policy = DraftPolicy(config)
        drafts: dict[int, list[int]] = {}
        plans = []
        for _ in range(200):
            most, how_many = policy.plan(40)
            out = SchedulerOutput(
                num_scheduled_tokens={i: 1 + len(drafts.get(i, ())) for i in range(40)},
                num_draft_tokens=dict.fromkeys(range(min(40, how_many)), most),
                scheduled_spec_decode_tokens=drafts,
            )
            seconds = 1 + 0.01 * sum(map(len, drafts.values()))
            kept = [[7] * (1 + right * (i in drafts)) for i in range(40)]
            policy.step_done(out, ModelRunnerOutput(list(range(40)), kept), seconds)
            plans.append((most, min(40, how_many)))
            drafts = {i: [7] * most for i in range(how_many if most else 0) if i < 40}
        asked = sum(most * how_many for most, how_many in plans)
        assert plans[:8] == [(0, 0)] * 5 + [(4, 8)] * 3
        assert asked == 3 * 4 * 8 if right == 0 else asked > 150 * 4 * 40


def test_costs_find_the_best_number() -> None:
    for cost, right, best in ((0.1, 0.9, 6), (0.3, 0.0, 0), (2.0, 0.9, 0)):
        costs = BatchCosts()
        for _ in range(50):
            costs.add_plain(1.0)
            num_right = [6] * round(10 * right) + [0] * round(10 - 10 * right)
            costs.add_drafted(6, [6] * 10, num_right, 10, 1 + 6 * cost)
        assert costs.best(6) == best


def test_a_served_engine_counts_drafts(folder: str) -> None:
    requests = random_requests(random.Random(5), 8)
    llm = make(folder, speculative_config=METHODS["oracle"])
    answers(llm, requests)
    answers(llm, requests)
    stats = llm.llm_engine.engine_core.engine_core.get_stats().spec_decoding
    assert stats is not None and stats.num_accepted_tokens == sum(stats.num_accepted_tokens_per_pos)
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens
    metrics = llm.get_metrics()
    assert metrics["spec_decode_num_accepted_tokens"] == stats.num_accepted_tokens
    assert all(isinstance(value, int) for value in metrics.values())
    assert make(folder).llm_engine.engine_core.engine_core.get_stats().spec_decoding is None


def test_the_trace_and_the_player_show_drafts(folder: str, tmp_path: Any) -> None:
    requests = random_requests(random.Random(6), 4)
    llm = make(folder, speculative_config=METHODS["oracle"])
    answers(llm, requests)
    with llm.record() as trace:
        answers(llm, requests)
    seen = [pair for step in trace.steps for pair in step.drafts.values()]
    assert seen and all(0 <= right <= number for number, right in seen)
    number, right = seen[0]
    assert f"{right} of {number} right, {right + 1} new tokens" in block_player(trace)
    again = Trace.load(trace.save(tmp_path / "trace.json"))
    assert [step.drafts for step in again.steps] == [step.drafts for step in trace.steps]


def test_guesses_take_no_block_from_a_sibling(folder: str) -> None:
    "Two sequences of a request in a pool that they nearly fill."
    prompt = [5, 6, 7] * 5 + [9] * 2
    params = SamplingParams(n=2, max_tokens=30, temperature=0.9, seed=1, ignore_eos=True)
    small = {"num_gpu_blocks_override": 12}
    expected = answers(make(folder, **small), [(prompt, params)])
    llm = make(folder, **small, speculative_config=METHODS["ngram"])
    assert answers(llm, [(prompt, params)]) == expected


def test_a_sleeping_engine_has_no_cache(folder: str) -> None:
    for method in ("self_quantized", "draft_model"):
        model = folder if method == "draft_model" else None
        llm = make(folder, speculative_config=speculate(method, model))
        llm.sleep(1)
        [proposer] = llm.collective_rpc(lambda worker: worker.model_runner.proposer)
        assert proposer.kv_caches == [] and proposer.drafter.graphs is None
