"""Images among random loads, on the simulated worker of `test_blocks`: what a step needs is encoded,
whole and once, within budget and room, and nothing is left behind.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from test_blocks import DEFAULTS, load, random_options, with_tokens
from test_random_seams import ChecksHashes

from teachvllm.core.orders import SchedulerOutput
from teachvllm.messages import EngineCoreRequest, MultiModalItem
from teachvllm.multimodal.encoder_cache import EncoderCacheManager, EncoderSchedule
from teachvllm.sequence import SequenceGroup


def make_schedule(budget: int, whole: bool, num_batched_tokens: int) -> EncoderSchedule:
    config: Any = SimpleNamespace(
        multimodal_config=SimpleNamespace(disable_chunked_mm_input=whole),
        encoder_budget=budget,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=num_batched_tokens),
    )
    return EncoderSchedule(config)


def image(mm_hash: str, *ranges: tuple[int, int]) -> MultiModalItem:
    return MultiModalItem("image", mm_hash, list(ranges), {})


class WithImages(ChecksHashes):
    "A simulation whose prompts have images here and there, and a worker that keeps embeddings."

    def __init__(self, rng: random.Random, budget: int, whole: bool = False, **options: Any):
        super().__init__(**options)
        self.rng = rng
        self.encoders = make_schedule(budget, whole, self.options["max_num_batched_tokens"])
        self.scheduler.orders.encoders = self.encoders
        self.core.preparers.append(self.prepare)
        self.kept: dict[str, int] = {}
        self.most_kept = self.num_encoded = self.num_cut = 0
        forget = self.worker.reset
        self.worker.reset = lambda: (self.kept.clear(), forget())  # type: ignore[func-returns-value]

    def prepare(self, request: EngineCoreRequest, group: SequenceGroup) -> None:
        items = []
        at = self.rng.randint(0, 3)
        end = len(request.prompt_token_ids)
        while at < end and self.rng.random() < 0.7:
            number = self.rng.randint(1, min(self.encoders.budget, end - at, 8))
            if self.encoders.whole:
                number = min(number, self.encoders.num_batched_tokens)
            ranges = [(at, number)]
            if number > 2 and self.rng.random() < 0.3:  # text between its two halves
                ranges = [(at, 1), (at + 2, number - 2)]
            items.append(image(f"{self.rng.randrange(4)} of {sum(n for _, n in ranges)}", *ranges))
            at += number + self.rng.randint(0, 4)
        group.first_seq.mm_items = items

    def check_schedule(self, schedule: Any) -> SchedulerOutput:
        out = super().check_schedule(schedule)
        for mm_hash in out.freed_mm_hashes:
            del self.kept[mm_hash]
        assert not self.kept.keys() & out.encoder_inputs.keys(), "encoded again, though it is kept"
        sizes = {mm_hash: item.num_tokens for mm_hash, item in out.encoder_inputs.items()}
        assert sum(sizes.values()) <= self.encoders.budget
        self.kept |= sizes
        self.num_encoded += len(sizes)
        self.most_kept = max(self.most_kept, sum(self.kept.values()))
        assert sum(self.kept.values()) <= self.encoders.cache.cache_size
        for seq_id, number in out.num_scheduled_tokens.items():
            _, seq = self.scheduler.seqs[seq_id]
            end = seq.num_computed_tokens
            for item in seq.mm_items:
                begin, last = item.ranges[0][0], sum(item.ranges[-1])
                if begin < end and last > end - number:
                    assert item.mm_hash in self.kept, "a token whose image was not encoded"
                    is_cut = end < last
                    self.num_cut += is_cut
                    assert not (is_cut and self.encoders.whole), "an image was cut"
        return out


# 230: beside forks that are computed again an image that may not be cut had too few of the tokens
@pytest.mark.parametrize("seed", [*range(40), 230])
def test_random_requests_with_images(seed: int) -> None:
    rng = random.Random(seed)
    budget, whole = rng.choice([3, 8, 20]), rng.random() < 0.3
    options = random_options(rng)
    if whole:
        options["window"] = None  # the two are refused together
    simulation = WithImages(rng, budget, whole, **options)
    load(simulation, rng, 20)
    cache = simulation.encoders.cache
    assert not any(cache.users.values()), "an ended sequence still holds an image"
    assert set(cache.sizes) == set(simulation.kept)
    assert cache.num_free + sum(cache.sizes.values()) == cache.cache_size


def test_the_loads_do_what_they_are_for() -> None:
    "Images are cut by chunks, encoded, and find no room in some of them."
    totals = {"encoded": 0, "cut": 0, "full": 0}
    for seed in range(12):
        rng = random.Random(seed)
        simulation = WithImages(rng, 8, **random_options(rng))
        load(simulation, rng, 12)
        totals["encoded"] += simulation.num_encoded
        totals["cut"] += simulation.num_cut
        totals["full"] += simulation.most_kept == 8
    assert all(totals.values()), totals


def test_a_chunk_may_end_at_any_place_of_an_image() -> None:
    for budget in range(1, 12):
        simulation = WithImages(random.Random(0), 6, max_num_batched_tokens=budget, chunked=True)
        simulation.prepare = lambda request, group: setattr(  # type: ignore[method-assign]
            group.first_seq, "mm_items", [image("a", (2, 6)), image("b", (9, 2), (12, 3))]
        )
        simulation.core.preparers[-1] = simulation.prepare
        simulation.add([1] * 16, with_tokens(3))
        simulation.finish()
        assert simulation.num_encoded == 2
        assert simulation.reasons == {"0": ["length"]}


def test_an_image_is_encoded_once_for_all_who_show_it() -> None:
    options = {**DEFAULTS, "max_num_batched_tokens": 64, "max_num_seqs": 8, "num_gpu_blocks": 64}
    simulation = WithImages(random.Random(0), 20, **options)
    simulation.core.preparers[-1] = lambda request, group: setattr(
        group.first_seq, "mm_items", [image("the same", (1, 6))]
    )
    for first in range(4):
        simulation.add([first] * 9, with_tokens(3))
    simulation.finish()
    assert simulation.num_encoded == 1


def test_the_least_recently_used_goes_first() -> None:
    cache = EncoderCacheManager(6)
    for name in "abc":
        cache.add(name, 2, 1)
    assert not cache.has_room(1)
    for name in "bac":
        cache.release(name, 1)
    cache.release("a", 7)  # it never used it
    cache.use("b", 2)
    assert cache.has_room(4) and not cache.has_room(5)
    cache.add("d", 3, 2)
    assert cache.take_freed() == ["a", "c"] and cache.take_freed() == []
    assert set(cache.sizes) == {"b", "d"} and cache.num_free == 1


@pytest.mark.parametrize(
    "items, says",
    [
        ([image("a", (0, 9))], "becomes 9 tokens, more than the encoder cache of 8: raise max_num"),
        ([image("a", (8, 4))], "has the places 8 to 12 of a prompt of 10"),
        ([image("a", (2, 3)), image("b", (4, 2))], "the one before it ends at 5"),
        ([image("a", (3, 0))], "has the places 3 to 3"),
        ([image("a", (0, 1), (6, 1))], "has 7 tokens of the prompt, more than the max_num_batched"),
    ],
)
def test_what_can_never_run_is_refused(items: list[MultiModalItem], says: str) -> None:
    encoders = make_schedule(8, True, 6)
    seq: Any = SimpleNamespace(mm_items=items, num_prompt_tokens=10)
    with pytest.raises(ValueError, match=says):
        encoders.check(seq)
