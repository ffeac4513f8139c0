"""Qwen2-VL beside transformers': positions with three parts, the vision tower, and greedy tokens
through a whole engine, whatever its steps look like.
"""

import functools
import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import FOR_TWO
from PIL import Image
from safetensors.torch import save_file
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from teachvllm import EngineArgs, SamplingParams
from teachvllm.attention.cpu import TorchSDPABackend
from teachvllm.config import NotSupportedYet
from teachvllm.engine.core import EngineCore
from teachvllm.executor.executor_base import get_executor_class
from teachvllm.messages import EngineCoreRequest, MultiModalItem
from teachvllm.model_executor.layers import ModelContext, load_weights
from teachvllm.model_executor.models.qwen2_vl import (
    Qwen2VLForConditionalGeneration as Ours,
)
from teachvllm.model_executor.models.qwen2_vl import mrope_positions

VOCAB = 120
KNOWN: dict[tuple[str, int], list[int]] = {}  # what `wanted` has found
START, END, IMAGE = 115, 116, 117  # vision_start, vision_end, image_pad
PATCH, MERGE = 4, 2


def small_config(**changes: Any) -> Qwen2VLConfig:
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100.0,  # so that few positions make a difference
            "mrope_section": [2, 3, 3],
        },
        "bos_token_id": None,
        "eos_token_id": None,
    }
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "num_heads": 2,
        "mlp_ratio": 2,
        "hidden_size": 64,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
    }
    changes = {name: dict(values) for name, values in changes.items()}
    return Qwen2VLConfig(
        text_config=text | changes.get("text", {}),
        vision_config=vision | changes.get("vision", {}),
        image_token_id=IMAGE,
        video_token_id=118,
        vision_start_token_id=START,
        vision_end_token_id=END,
        **changes.get("whole", {}),
    )


@functools.cache
def their_model(tied: bool = False) -> Any:
    "transformers' model, with weights so large that pictures and positions matter."
    torch.manual_seed(0)
    config = small_config(whole={"tie_word_embeddings": tied})
    model = Qwen2VLForConditionalGeneration(config).float().eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2 if "visual" in name else 0.15)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2-vl")
    their_model().save_pretrained(path)
    return path


def picture(width: int, height: int, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@functools.cache
def features(width: int, height: int, seed: int) -> dict[str, torch.Tensor]:
    "What transformers' processor makes of a picture, which becomes 4 to 30 tokens."
    factor = PATCH * MERGE
    processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        size={"shortest_edge": 4 * factor**2, "longest_edge": 30 * factor**2},
    )
    return dict(processor(picture(width, height, seed), return_tensors="pt"))


Size = tuple[int, int, int]  # width, height and seed of a picture


def make_prompt(parts: list[list[int] | Size]) -> tuple[list[int], list[MultiModalItem]]:
    "Text (a list) and pictures (a tuple) one after the other, as ids and items."
    ids: list[int] = []
    items = []
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        found = features(*part)
        frames, rows, columns = found["image_grid_thw"][0].tolist()
        grid = (frames, rows // MERGE, columns // MERGE)
        number = int(np.prod(grid))
        ids.append(START)
        packed = {
            name: (str(x.numpy().dtype), list(x.shape), x.numpy().tobytes())
            for name, x in found.items()
        }
        mm_hash = hashlib.sha256(packed["pixel_values"][2]).hexdigest()
        items.append(MultiModalItem("image", mm_hash, [(len(ids), number)], packed, grid))
        ids += [IMAGE] * number + [END]
    return ids, items


def images_of(parts: list[list[int] | Size]) -> dict[str, Any]:
    "The same pictures as arguments of transformers' model."
    found = [features(*part) for part in parts if not isinstance(part, list)]
    if not found:
        return {}
    return {name: torch.cat([x[name] for x in found]) for name in found[0]}


def text(rng: random.Random, longest: int = 12, least: int = 0) -> list[int]:
    return [rng.randrange(3, 110) for _ in range(rng.randint(least, longest))]


def random_parts(rng: random.Random, num_images: int) -> list[list[int] | Size]:
    parts: list[list[int] | Size] = [text(rng)]
    for _ in range(num_images):
        parts += [(rng.randint(9, 70), rng.randint(9, 70), rng.randrange(5)), text(rng)]
    return [*parts, text(rng, least=1)]


def wanted(parts: list[list[int] | Size], num_tokens: int = 6) -> list[int]:
    "transformers' greedy continuation."
    key = repr(parts), num_tokens
    if key not in KNOWN:
        KNOWN[key] = greedy(parts, num_tokens)
    return KNOWN[key]


@torch.inference_mode()
def greedy(parts: list[list[int] | Size], num_tokens: int) -> list[int]:
    ids, _ = make_prompt(parts)
    asked = torch.tensor([ids])
    images = images_of(parts)
    if images:
        images["mm_token_type_ids"] = (asked == IMAGE).int()
    out = their_model().generate(
        asked,
        attention_mask=torch.ones_like(asked),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=[10**9],
        pad_token_id=0,
        **images,
    )
    return out[0, len(ids) :].tolist()


class Engine:
    "A core, and the tokens of the requests that it was given."

    def __init__(self, path: Path, num_tokens: int = 6, **options: Any):
        defaults = {
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "num_gpu_blocks_override": 256,
            "block_size": 4,
            "swap_space": 0.01,
            "device": FOR_TWO,
        }
        config = EngineArgs(str(path), **{**defaults, **options}).create_engine_config()
        self.core = EngineCore(config, get_executor_class(config))
        self.params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        self.tokens: dict[str, list[int]] = {}
        self.num_cached: dict[str, int] = {}
        self.num_steps = 0

    def add(self, parts: list[list[int] | Size]) -> str:
        ids, items = make_prompt(parts)
        name = str(len(self.tokens))
        self.tokens[name] = []
        self.core.add_request(EngineCoreRequest(name, ids, self.params, 0, mm_items=items))
        return name

    def step(self) -> None:
        self.num_steps += 1
        for output in self.core.step().outputs:
            self.tokens[output.request_id] += output.new_token_ids
            if output.num_cached_tokens is not None:
                self.num_cached[output.request_id] = output.num_cached_tokens

    def run(self, prompts: list[list[list[int] | Size]]) -> list[list[int]]:
        names = [self.add(parts) for parts in prompts]
        while self.core.has_work():
            self.step()
        return [self.tokens[name] for name in names]

    @property
    def encoders(self) -> Any:
        return self.core.scheduler.orders.encoders

    @property
    def runner(self) -> Any:
        return self.core.executor.collective_rpc(lambda worker: worker.model_runner)[0]


@contextmanager
def engine(path: Path, **options: Any) -> Iterator[Engine]:
    one = Engine(path, **options)
    try:
        yield one
        manager = one.core.scheduler.block_manager
        manager.check_integrity()
        assert manager.get_num_free_gpu_blocks() == manager.num_gpu_blocks
        assert not any(one.encoders.cache.users.values())
    finally:
        one.core.shutdown()


# Positions


def their_positions(parts: list[list[int] | Size]) -> tuple[np.ndarray, int]:
    ids, _ = make_prompt(parts)
    asked = torch.tensor([ids])
    grids = images_of(parts).get("image_grid_thw")
    positions, delta = their_model().model.get_rope_index(
        asked, mm_token_type_ids=(asked == IMAGE).int(), image_grid_thw=grids
    )
    return positions[:, 0].numpy(), int(delta)


@pytest.mark.parametrize("seed", range(40))
def test_positions_are_transformers(seed: int) -> None:
    rng = random.Random(seed)
    parts = random_parts(rng, seed % 4)
    ids, items = make_prompt(parts)
    places = [(item.mm_hash, item.ranges, item.grid) for item in items]
    theirs, delta = their_positions(parts)
    n = len(ids)
    ours = mrope_positions(places, 0, n + 5)
    assert ours.dtype == np.int64
    np.testing.assert_array_equal(ours[:, :n], theirs)
    np.testing.assert_array_equal(ours[:, n:], np.tile(np.arange(n, n + 5) + delta, (3, 1)))
    for _ in range(20):  # any piece, cut anywhere
        begin = rng.randrange(n + 5)
        end = rng.randint(begin + 1, n + 5)
        np.testing.assert_array_equal(mrope_positions(places, begin, end), ours[:, begin:end])


def test_an_image_moves_the_text_behind_it() -> None:
    positions = mrope_positions([("a", [(2, 6)], (1, 2, 3))], 0, 11)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7],
    ]


@pytest.mark.parametrize(
    "ranges, grid", [([(2, 6)], None), ([(2, 5)], (1, 2, 3)), ([(2, 3), (6, 3)], (1, 2, 3))]
)
def test_an_image_without_a_grid_is_refused(ranges: Any, grid: Any) -> None:
    with pytest.raises(ValueError, match="M-RoPE needs its frames, rows and columns"):
        mrope_positions([("a", ranges, grid)], 0, 4)


# The model


def our_model(theirs: Any) -> Any:
    context = ModelContext(TorchSDPABackend, 4, torch.float32)
    model = Ours(theirs.config, context)
    load_weights(model, theirs.state_dict().items())
    return model


@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_embeddings_of_images_are_transformers(tied: bool) -> None:
    theirs = their_model(tied)
    model = our_model(theirs)
    sizes: list[Size] = [(13, 57, 0), (70, 9, 1), (33, 31, 2), (8, 8, 3)]
    items = [features(*size) for size in sizes]
    found = model.get_multimodal_embeddings(items)
    images = images_of(list(sizes))
    asked = theirs.model.get_image_features(images["pixel_values"], images["image_grid_thw"])
    for ours, right, item in zip(found, asked.pooler_output, items, strict=True):
        torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)
        alone = model.get_multimodal_embeddings([item])
        torch.testing.assert_close(ours, alone[0], atol=1e-5, rtol=1e-5)
    spread = torch.cat(found).std(0).mean()
    assert spread > 0.1, "the test's pictures all look the same"


@torch.inference_mode()
def test_frames_do_not_see_each_other() -> None:
    theirs = their_model()
    model = our_model(theirs)
    patches = torch.randn(3 * 4 * 6, 3 * 2 * PATCH**2)
    grid = torch.tensor([[3, 4, 6]])
    ours = model.get_multimodal_embeddings([{"pixel_values": patches, "image_grid_thw": grid}])
    right = theirs.model.visual(patches, grid_thw=grid).pooler_output
    torch.testing.assert_close(ours[0], right, atol=1e-5, rtol=1e-5)


def test_what_is_not_served_is_refused() -> None:
    context = ModelContext(TorchSDPABackend, 4, torch.float32)
    config = small_config()
    config.text_config.rope_parameters["mrope_section"] = [2, 2, 2]
    with pytest.raises(ValueError, match=r"mrope_section=\[2, 2, 2\] must be the 8 pairs"):
        Ours(config, context)
    config = small_config(vision={"embed_dim": 36, "num_heads": 6})
    with pytest.raises(ValueError, match="embed_dim=36 must be a multiple of 4"):
        Ours(config, context)
    config = small_config(text={"sliding_window": 8, "use_sliding_window": True})
    config.text_config.layer_types = ["chunked_attention"] * 2
    with pytest.raises(NotSupportedYet, match="chunked_attention"):
        Ours(config, context)


# Through the engine


PICTURES: list[list[list[int] | Size]] = [
    [[5, 6, 7], (41, 23, 0), [8, 9]],
    [(9, 61, 1), [4]],
    [[10, 11], (35, 35, 2), [12], (63, 17, 3), [13, 14, 15], (20, 50, 4), [16]],
    [[20, 21, 22, 23, 24]],
    [[30]],
]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True},
        {"max_num_batched_tokens": 16, "max_num_seqs": 3},
        {"max_num_batched_tokens": 40, "disable_chunked_mm_input": True},
        {"enable_chunked_prefill": False},
        {"async_scheduling": True},
        {"attention_backend": "torch_sdpa"},
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 2,
                "prompt_lookup_min": 1,
            }
        },
    ],
    ids=str,
)
def test_tokens_are_transformers(folder: Path, options: dict[str, Any]) -> None:
    right = [wanted(parts) for parts in PICTURES]
    assert len({tuple(tokens) for tokens in right}) == len(right)
    with engine(folder, **options) as one:
        assert one.run(PICTURES) == right


def test_the_picture_and_its_positions_matter(folder: Path) -> None:
    "Another picture, or its transpose, gives other tokens: else the tests above prove nothing."
    one, other, turned = (
        wanted([[5, 6], size, [7]]) for size in ((41, 23, 0), (41, 23, 1), (23, 41, 0))
    )
    assert one != other and one != turned
    with engine(folder) as broken:
        broken.runner.model.uses_mrope = False
        assert broken.run([PICTURES[2]]) != [wanted(PICTURES[2])]


def set_limit(config: Any, num_tokens: int) -> None:
    "From now on a step has at most so many tokens."
    object.__setattr__(config, "max_num_batched_tokens", num_tokens)


def test_a_chunk_may_end_at_any_place_of_an_image(folder: Path) -> None:
    parts: list[list[int] | Size] = [[5, 6, 7], (33, 31, 0), [8, 9]]
    ids, items = make_prompt(parts)
    right = wanted(parts, 3)
    offset, number = items[0].ranges[0]
    with engine(
        folder, num_tokens=3, enable_prefix_caching=False, max_num_batched_tokens=64
    ) as one:
        scheduler = one.core.scheduler
        ends = set()
        for first in range(1, len(ids) + 1):
            set_limit(scheduler.config, first)
            name = one.add(parts)
            one.step()
            [[_, seq]] = scheduler.seqs.values()
            ends.add(seq.num_computed_tokens)
            set_limit(scheduler.config, 64)
            while one.core.has_work():
                one.step()
            assert one.tokens[name] == right
        assert ends >= set(range(offset, offset + number + 1)), "no chunk ended there"


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_small_steps(folder: Path, size: int) -> None:
    "Every chunk of every prompt has few tokens."
    prompts = [PICTURES[0], PICTURES[3], PICTURES[2]]
    with engine(folder, max_num_batched_tokens=size, max_num_seqs=min(size, 2)) as one:
        one.encoders.budget = one.encoders.cache.cache_size = one.encoders.cache.num_free = 64
        assert one.run(prompts) == [wanted(parts) for parts in prompts]
        assert one.num_steps > sum(len(make_prompt(parts)[0]) for parts in prompts) / size


def test_two_images_under_the_same_text(folder: Path) -> None:
    "The same ids and grids: only the pictures differ. Then both again, found in the cache."
    size = (41, 23)
    prompts = [[list(range(3, 15)), (*size, seed), list(range(20, 31))] for seed in range(2)]
    ids = [make_prompt(parts)[0] for parts in prompts]
    assert ids[0] == ids[1]
    right = [wanted(parts) for parts in prompts]
    assert right[0] != right[1]
    with engine(folder) as one:
        assert [one.run([parts])[0] for parts in prompts] == right
        assert one.num_cached["0"] == 0 and one.num_cached["1"] == 12  # the text before
        assert one.run(prompts) == right
        for name in ("2", "3"):
            assert one.num_cached[name] == (len(ids[0]) - 1) // 4 * 4
        # a prefix that ends inside the picture, and another text behind it
        longer = [parts[:2] + [[40, 41]] for parts in prompts]
        assert one.run(longer) == [wanted(parts) for parts in longer]
        assert one.num_cached["4"] > 12


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [False, True])
def test_preempted_requests_get_the_same_tokens(folder: Path, mode: str, caching: bool) -> None:
    prompts: list[list[list[int] | Size]] = [
        [[3 + i, 4], (41, 23, i), [5 + i] * i, (20, 20, i), [9]] for i in range(3)
    ]
    longest = max(len(make_prompt(parts)[0]) for parts in prompts)
    right = [wanted(parts, 16) for parts in prompts]
    with engine(
        folder,
        num_tokens=16,
        num_gpu_blocks_override=(longest + 16) // 4 + 7,
        preemption_mode=mode,
        enable_prefix_caching=caching,
    ) as one:
        assert one.run(prompts) == right
        assert one.core.scheduler.preemption.num_preemptions > 0


@pytest.mark.parametrize("seed", range(6))
def test_random_loads(folder: Path, seed: int) -> None:
    "Requests with 0 to 3 images come while others run, in an engine of random limits."
    rng = random.Random(seed)
    prompts = [random_parts(rng, rng.randrange(4)) for _ in range(7)]
    with engine(
        folder,
        max_num_batched_tokens=rng.choice([32, 48, 64]),
        max_num_seqs=rng.choice([2, 4, 8]),
        block_size=rng.choice([2, 4, 16]),
        enable_prefix_caching=rng.random() < 0.7,
        num_gpu_blocks_override=rng.choice([100, 256]),
    ) as one:
        names = []
        for parts in prompts:
            names.append(one.add(parts))
            for _ in range(rng.randrange(4)):
                one.step()
        while one.core.has_work():
            one.step()
        assert [one.tokens[name] for name in names] == [wanted(parts) for parts in prompts]


def test_text_alone_is_replayed_as_before(folder: Path) -> None:
    "A step has three parts of positions only where an image's sequence takes part."
    with engine(folder) as one:
        runner = one.runner
        seen = []
        run_model = runner._run_model

        def noted(batch: Any, *args: Any) -> Any:
            recorded = runner.graphs is not None and runner.graphs.can_run(batch)
            seen.append((set(batch.extras), recorded, batch.num_decodes == batch.num_queries))
            return run_model(batch, *args)

        runner._run_model = noted
        assert one.run([PICTURES[3]]) == [wanted(PICTURES[3])]
        assert not any(extras for extras, _, _ in seen)
        assert runner.graphs is None or all(recorded for _, recorded, decodes in seen if decodes)
        seen.clear()
        assert one.run([PICTURES[0], PICTURES[3]]) == [wanted(PICTURES[i]) for i in (0, 3)]
        assert {"rope_t", "rope_h", "rope_w"} <= seen[0][0]
        # behind its image a text counts by one in all parts: its steps are like any other
        assert not any(extras for extras, _, decodes in seen if decodes)
        assert runner.graphs is None or all(recorded for _, recorded, decodes in seen if decodes)


def test_a_checkpoint_with_the_names_of_the_hub(folder: Path, tmp_path: Path) -> None:
    state = {}
    for name, tensor in their_model().state_dict().items():
        name = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        state[name] = tensor.contiguous()
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    flat = config | config.pop("text_config") | {"model_type": "qwen2_vl"}
    rope = flat.pop("rope_parameters")
    flat["rope_theta"] = rope["rope_theta"]
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat["architectures"] = ["Qwen2VLForConditionalGeneration"]
    flat.pop("text_config", None)
    (tmp_path / "config.json").write_text(json.dumps(flat))
    with engine(tmp_path) as one:
        assert one.run([PICTURES[0]]) == [wanted(PICTURES[0])]


@pytest.mark.parametrize("tp, pp", [(2, 1), (1, 2)])
def test_several_workers(folder: Path, tp: int, pp: int) -> None:
    options = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    prompts = [PICTURES[2], PICTURES[3]]
    with engine(folder, **options, max_num_batched_tokens=48) as one:
        assert one.run(prompts) == [wanted(parts) for parts in prompts]
