"""A prompt with pictures becomes the token ids and arrays that transformers' processor makes."""

import asyncio
import base64
import dataclasses
import json
import threading
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pictures import picture
from PIL import Image
from tiny_eyes import FAMILIES, PLACEHOLDERS, model_config, save_family

from teachvllm.arg_utils import EngineArgs, create_multimodal_config
from teachvllm.config import MultiModalConfig, NotSupportedYet
from teachvllm.engine.llm_engine import Processor
from teachvllm.entrypoints.protocol import ChatCompletionRequest, RequestError, TokenizeRequest
from teachvllm.entrypoints.serving import PromptReader
from teachvllm.inputs import InputProcessor, get_tokenizer, render_chat, takes_parts
from teachvllm.messages import MultiModalItem, PromptEmbedding
from teachvllm.multimodal.images import MediaReader
from teachvllm.multimodal.processing import (
    MULTIMODAL_PROCESSORS,
    LlavaRules,
    MultiModalProcessor,
    ProcessorCache,
    join_tokens,
    register_processor,
)
from teachvllm.sampling_params import PoolingParams, SamplingParams

SIZES = [(70, 45), (45, 70), (200, 31), (31, 200), (13, 9), (56, 56), (1, 1), (300, 299), (199, 1)]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    "Of each family a folder, and transformers' processor."
    home = tmp_path_factory.mktemp("families")
    return {name: save_family(name, home / name) for name in FAMILIES}


def processor_of(
    folder: Path, config: MultiModalConfig | None = None, **options: Any
) -> MultiModalProcessor:
    return MultiModalProcessor(model_config(folder, **options), get_tokenizer(folder), config)


def arrays_of(item: MultiModalItem) -> dict[str, np.ndarray[Any, Any]]:
    return {
        name: np.frombuffer(data, dtype).reshape(shape)
        for name, (dtype, shape, data) in item.features.items()
    }


def theirs(processor: Any, text: str, images: list[Any] | None, **options: Any) -> Any:
    "What transformers makes: the token ids, and by name the arrays of all images together."
    made = processor(text=text, images=images, **options)
    ids = made["input_ids"]
    ids = ids[0] if isinstance(ids[0], list | np.ndarray) else ids
    text_only = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
    return list(ids), {name: made[name] for name in made if name not in text_only}


def check_ranges(processor: Any, ids: list[int], items: list[Any]) -> None:
    "They are the places of the image's token, in order, each once."
    places = [
        place
        for item in items
        for begin, number in item.ranges
        for place in range(begin, begin + number)
    ]
    assert places == [i for i, one in enumerate(ids) if one == processor.rules.image_token_id]
    for item in items:
        ends = [begin + number for begin, number in item.ranges]
        assert all(a < b for a, (b, _) in zip(ends, item.ranges[1:]))


# Equal to transformers


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", SIZES)
def test_one_image(families: Any, family: str, size: tuple[int, int]) -> None:
    folder, reference = families[family]
    processor = processor_of(folder)
    text = f"what is in {PLACEHOLDERS[family]} ? Answer: "
    image = picture(*size)
    made_text, ids, items = processor.apply(text, [image])
    expected_ids, expected = theirs(reference, text, [image])
    assert made_text == text and ids == expected_ids
    (item,) = items
    check_ranges(processor, ids, items)
    found = arrays_of(item)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(found[name], np.asarray(array)), name
    assert item.num_tokens <= processor.max_tokens_per_image()


@pytest.mark.parametrize("family", FAMILIES)
def test_several_images(families: Any, family: str) -> None:
    folder, reference = families[family]
    processor = processor_of(folder)
    place = PLACEHOLDERS[family]
    images = [picture(*size, seed=i) for i, size in enumerate([(70, 45), (31, 200), (13, 9)])]
    texts = [
        f"{place}{place}{place}",
        f"a\n{place}\n{place} b\n\n\n{place}\n\n\n\nc",
        f"\n\n{place} \n{place}\n {place}",
        f"red {place}, blue {place}. yes {place}\nno",
    ]
    for text in texts:
        _, ids, items = processor.apply(text, images)
        expected_ids, _ = theirs(reference, text, images)
        assert ids == expected_ids
        check_ranges(processor, ids, items)
        # as if each were alone: what is padded, or stacked, is so for no other's sake
        for image, item in zip(images, items, strict=True):
            _, alone = theirs(reference, place, [image])
            for name, array in alone.items():
                assert np.array_equal(arrays_of(item)[name], np.asarray(array))
    assert processor.cache.hits == 9 and processor.cache.queries == 12


@pytest.mark.parametrize("family", FAMILIES)
def test_token_ids_for_text(families: Any, family: str) -> None:
    "Of a prompt that the user has tokenized, line breaks meeting those around an image included."
    folder, reference = families[family]
    processor = processor_of(folder)
    place = PLACEHOLDERS[family]
    images = [picture(70, 45, 1), picture(31, 200, 2)]
    for text in (
        f"{place}{place}",
        f"is {place} a\n{place}\nb",
        f"is\n\n{place}\n\n{place}",
        f"is {place} {place}",
    ):
        ids = get_tokenizer(folder)(text).input_ids
        before = list(ids)
        made_text, made, items = processor.apply(ids, images)
        assert made_text is None and ids == before
        assert made == theirs(reference, text, images)[0]
        check_ranges(processor, made, items)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_without_a_tokenizer(families: Any, family: str) -> None:
    folder, reference = families[family]
    processor = MultiModalProcessor(model_config(folder, skip_tokenizer_init=True))
    text = f"is {PLACEHOLDERS[family]} a"
    _, ids, items = processor.apply(get_tokenizer(folder)(text).input_ids, [picture()])
    assert ids == theirs(reference, text, [picture()])[0]
    check_ranges(processor, ids, items)
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        processor.apply(text, [picture()])


@pytest.mark.parametrize("family", ["idefics3", "gemma3"])
def test_images_that_need_a_tokenizer(families: Any, family: str) -> None:
    processor = MultiModalProcessor(model_config(families[family][0]))
    with pytest.raises(ValueError, match="this model's images need a tokenizer"):
        processor.apply([5, processor.rules.placeholder_id], [picture()])


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "LA", "1"])
def test_other_colours(families: Any, mode: str) -> None:
    folder, reference = families["llava"]
    image = picture(70, 45).convert(mode)
    (item,) = processor_of(folder).apply("<image>", [image])[2]
    _, expected = theirs(reference, "<image>", [image])
    assert np.array_equal(arrays_of(item)["pixel_values"], expected["pixel_values"])


def test_arrays(families: Any) -> None:
    folder, reference = families["llava"]
    processor = processor_of(folder)
    array = np.asarray(picture())
    for form in (array, array.transpose(2, 0, 1)):
        (item,) = processor.apply("<image>", [form])[2]
        _, expected = theirs(reference, "<image>", [form])
        assert np.array_equal(arrays_of(item)["pixel_values"], expected["pixel_values"])
    # their own processor makes nearly black pictures of these
    (share,) = processor.apply("<image>", [array / 255])[2]
    assert share == item


OPTIONS: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [
    ("llava", {"do_normalize": False}, None),
    (
        "llava",
        {"image_mean": (0.1, 0.2, 0.3), "image_std": [1, 2, 3.0]},
        {"image_mean": [0.1, 0.2, 0.3], "image_std": [1.0, 2.0, 3.0]},
    ),
    ("llava", {"resample": 0}, None),
    ("idefics3", {"do_image_splitting": False}, None),
    ("idefics3", {"size": {"longest_edge": 112}}, None),
    (
        "qwen2_vl",
        {"max_pixels": 28 * 28 * 9},
        {"size": {"shortest_edge": 3136, "longest_edge": 7056}},
    ),
    (
        "qwen2_vl",
        {"min_pixels": 28 * 28 * 40},
        {"size": {"shortest_edge": 31360, "longest_edge": 50176}},
    ),
    ("qwen2_vl", {"size": {"shortest_edge": 3136, "longest_edge": 7056}}, None),
    (
        "gemma3",
        {
            "do_pan_and_scan": True,
            "pan_and_scan_min_crop_size": 20,
            "pan_and_scan_max_num_crops": 3,
        },
        None,
    ),
    ("gemma3", {"do_pan_and_scan": True}, None),
]


@pytest.mark.parametrize("family, options, same", OPTIONS)
@pytest.mark.parametrize("at_startup", [False, True])
def test_processor_kwargs(
    families: Any, family: str, options: Any, same: Any, at_startup: bool
) -> None:
    folder, reference = families[family]
    if at_startup or family != "gemma3":
        config = MultiModalConfig(mm_processor_kwargs=options if at_startup else None)
        processor = processor_of(folder, config)
        image = picture(200, 60)
        text = f"{PLACEHOLDERS[family]} a\n"
        _, ids, (item,) = processor.apply(text, [image], {} if at_startup else options)
        expected_ids, expected = theirs(reference, text, [image], **(same or options))
        assert ids == expected_ids
        check_ranges(processor, ids, [item])
        for name, array in expected.items():
            assert np.array_equal(arrays_of(item)[name], np.asarray(array))
        plain = processor_of(folder).apply(text, [image])[2][0]
        changes = plain.features != item.features
        assert (plain.mm_hash != item.mm_hash) and changes == (options != {"do_pan_and_scan": True})


# Limits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_model_len", [30, 130, 2048])
def test_no_legal_image_is_larger_than_the_largest(
    families: Any, family: str, max_model_len: int
) -> None:
    folder, _ = families[family]
    processor = processor_of(folder, max_model_len=max_model_len)
    most = processor.max_tokens_per_image()
    dummy = processor.dummy_item()
    assert dummy.num_tokens == most <= max_model_len and dummy.ranges == [(0, most)]
    assert all(array.size for array in arrays_of(dummy).values())
    rng = np.random.default_rng(1)
    for _ in range(300):
        height, width = (int(2 ** rng.uniform(0, 13)) for _ in range(2))
        if max(height, width) <= 200 * min(height, width):
            number = processor.rules.num_tokens(height, width, {})
            assert number <= most or number > max_model_len


def test_too_many_images(families: Any) -> None:
    folder, _ = families["llava"]
    for limit in (0, 1, {"count": 1}):
        config = MultiModalConfig(limit_mm_per_prompt={"image": limit})
        number = limit if isinstance(limit, int) else 1
        says = rf"At most {number} image\(s\) may be provided in one prompt\. Set `--limit-mm"
        with pytest.raises(ValueError, match=says):
            processor_of(folder, config).apply("<image><image>", ["no", "such"])
    off = MultiModalConfig(language_model_only=True)
    with pytest.raises(ValueError, match="At most 0 image"):
        processor_of(folder, off).apply("<image>", [picture()])


def test_images_that_are_longer_than_the_model(families: Any) -> None:
    processor = processor_of(families["llava"][0], max_model_len=40)
    read = []
    decode = processor.reader.decode

    class Reader(MediaReader):
        def decode(self, source: Any) -> Image.Image:
            read.append(1)
            return decode(source)

    processor.reader = Reader()
    images = [picture(seed=i) for i in range(9)]
    with pytest.raises(ValueError, match="48 tokens of images, so with one token of output"):
        processor.apply("<image>" * 9, images)
    assert len(read) == 3  # the others are not looked at


def test_an_image_that_is_larger_than_the_profile(families: Any) -> None:
    "A request's own settings cannot make more of an image than what memory was measured with."
    processor = processor_of(families["qwen2_vl"][0])
    most = processor.max_tokens_per_image()
    says = rf"image item with length \d+, which exceeds the pre-allocated encoder cache size {most}"
    huge = {"min_pixels": 2**38, "max_pixels": 2**39}
    with pytest.raises(ValueError, match=says):
        processor.apply("<|image_pad|>", [picture()], huge)
    crops = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 1}
    with pytest.raises(ValueError, match="length 20, which exceeds"):
        processor_of(families["gemma3"][0]).apply("<start_of_image>", [picture(200, 20)], crops)


BAD_OPTIONS: list[tuple[str, Any, str]] = [
    ("llava", {"no_such": 1}, "'no_such' is none of"),
    ("llava", {"do_resize": False}, "'do_resize' is not in teachvllm yet"),
    ("llava", {"size": {"height": 9}}, "'size' is not in teachvllm yet"),
    ("llava", {"do_normalize": 1}, "must be True or False"),
    ("llava", {"image_mean": [1, 2]}, "must be three numbers"),
    ("llava", {"image_mean": [1, 2, float("nan")]}, "must be three numbers"),
    ("llava", {"image_std": [1, 0, 1]}, "image_std has a 0"),
    ("llava", {"resample": 9}, "one of Pillow's filters"),
    ("llava", {"rescale_factor": -1}, "a positive number"),
    ("llava", [1], "a dict"),
    ("llava", {3: 4}, "is none of"),
    ("idefics3", {"size": 100}, "a dict of positive whole numbers"),
    ("idefics3", {"size": {"longest_edge": -1}}, "a dict of positive whole numbers"),
    ("idefics3", {"size": {"height": 5, "width": 5}}, r"size has no \['height'\]"),
    ("idefics3", {"max_image_size": {"longest_edge": 9}}, "not in teachvllm yet"),
    ("idefics3", {"size": {"longest_edge": 2**39}}, "exceeds"),
    ("qwen2_vl", {"max_pixels": "many"}, "a positive whole number"),
    ("qwen2_vl", {"max_pixels": 2**60}, "a positive whole number"),
    ("qwen2_vl", {"min_pixels": 28 * 28 * 65}, "min_pixels is more than max_pixels"),
    ("qwen2_vl", {"patch_size": 7}, "not in teachvllm yet"),
    ("gemma3", {"pan_and_scan_max_num_crops": 0}, "a positive whole number"),
]


@pytest.mark.parametrize("family, options, words", BAD_OPTIONS)
def test_bad_processor_kwargs(families: Any, family: str, options: Any, words: str) -> None:
    processor = processor_of(families[family][0])
    with pytest.raises(ValueError, match=words):
        processor.apply(PLACEHOLDERS[family], [picture(200, 200)], options)


# Wrong counts, files that do not fit


@pytest.mark.parametrize("family", FAMILIES)
def test_wrong_counts(families: Any, family: str) -> None:
    processor = processor_of(families[family][0])
    place = PLACEHOLDERS[family]
    token = processor.rules.placeholder_id
    for prompt, number, found in (
        ("no place", 1, 0),
        (place, 2, 1),
        (place * 3, 2, 3),
        ([5, 6], 1, 0),
        ([token, token], 1, 2),
    ):
        says = f"be {number} prompt updates .* instead found {found} prompt updates! .*forgot"
        with pytest.raises(ValueError, match=says):
            processor.apply(prompt, [picture()] * number)
    assert processor.cache.queries == 0


def test_an_images_token_in_the_text(families: Any) -> None:
    processor = processor_of(families["gemma3"][0])
    with pytest.raises(ValueError, match="Attempted to assign 4 = 4 multimodal tokens to 5 placeh"):
        processor.apply("<start_of_image> <image_soft_token>", [picture()])


def change(folder: Path, into: Path, file: str, **changes: Any) -> Path:
    "A copy of a folder with something changed in a JSON file; `None`: the file is gone."
    into.mkdir()
    for path in folder.iterdir():
        (into / path.name).write_bytes(path.read_bytes())
    if not changes:
        (into / file).unlink()
        return into
    stored = json.loads((into / file).read_text())
    for name, value in changes.items():
        part = stored
        *outer, last = name.split("__")
        for one in outer:
            part = part[one]
        part[last] = value
    (into / file).write_text(json.dumps(stored))
    return into


UNFIT: list[tuple[str, str, dict[str, Any], str]] = [
    ("llava", "processor_config.json", {}, "names an image_processor_type"),
    (
        "llava",
        "processor_config.json",
        {"num_additional_image_tokens": 0},
        "do not belong together",
    ),
    ("llava", "processor_config.json", {"patch_size": 28}, "do not belong together"),
    (
        "llava",
        "processor_config.json",
        {"image_processor__image_processor_type": "PixtralImageProcessorFast"},
        "'PixtralImageProcessor' is not in teachvllm yet",
    ),
    ("llava", "config.json", {"architectures": ["MllamaForConditionalGeneration"]}, "Mllama"),
    ("idefics3", "processor_config.json", {"image_seq_len": 5}, "image_seq_len=5"),
    (
        "idefics3",
        "config.json",
        {"vision_config__image_size": 28},
        "image_seq_len=4|max_image_size",
    ),
    ("qwen2_vl", "preprocessor_config.json", {"merge_size": 4}, "merge_size=4"),
    ("gemma3", "processor_config.json", {"image_seq_length": 16}, "image_seq_length=16"),
]


@pytest.mark.parametrize("family, file, changes, words", UNFIT)
def test_files_that_do_not_fit(
    families: Any, tmp_path: Path, family: str, file: str, changes: Any, words: str
) -> None:
    folder = change(families[family][0], tmp_path / "changed", file, **changes)
    with pytest.raises(ValueError, match=words):
        processor_of(folder)


def test_older_folders(families: Any, tmp_path: Path) -> None:
    "A fast class by name, in a file of its own, and no processor_config.json."
    folder, reference = families["llava"]
    stored = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    older = change(folder, tmp_path / "older", "processor_config.json")
    stored["image_processor_type"] = "CLIPImageProcessorFast"
    (older / "preprocessor_config.json").write_text(json.dumps(stored))
    (older / "chat_template.json").write_text(json.dumps({"chat_template": "from a file"}))
    processor = processor_of(older)
    assert (
        processor.apply("a <image>", [picture()])[1]
        == theirs(reference, "a <image>", [picture()])[0]
    )
    assert processor.chat_template == "from a file"
    assert processor_of(folder).chat_template is None


def test_rules_of_ones_own(families: Any) -> None:
    class Mine(LlavaRules):
        "Two tokens more."

        def replacement(self, features: Any, number: int) -> str:
            return "a" + super().replacement(features, number) + "a"

    name = "LlavaForConditionalGeneration"
    try:
        register_processor(name, Mine)
        _, ids, items = processor_of(families["llava"][0]).apply("<image>", [picture()])
        assert len(ids) == 19 and items[0].ranges == [(2, 16)]
    finally:
        register_processor(name, LlavaRules)
    assert MULTIMODAL_PROCESSORS[name] is LlavaRules


def test_line_breaks_that_meet(families: Any) -> None:
    tokenizer = get_tokenizer(families["gemma3"][0])

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    for left, right in (
        ("a\n", "\nb"),
        ("\n\n", "\n"),
        ("a", "\nb"),
        ("a\n", "b"),
        ("", "\n"),
        ("a", ""),
    ):
        assert join_tokens(tokenizer, ids(left), ids(right)) == ids(left + right)


# Hashes and the cache


def test_hashes(families: Any) -> None:
    processor = processor_of(families["llava"][0])

    def hash_of(image: Any, **options: Any) -> str:
        return processor.apply("<image>", [image], options)[2][0].mm_hash

    one = hash_of(picture())
    assert one == hash_of(picture()) == hash_of(np.asarray(picture()))
    others = {
        hash_of(picture(seed=1)),
        hash_of(picture(71)),
        hash_of(picture(), do_normalize=False),
    }
    assert len(others | {one}) == 4
    other = processor_of(
        families["llava"][0], MultiModalConfig(mm_processor_kwargs={"resample": 0})
    )
    assert other.apply("<image>", [picture()])[2][0].mm_hash != one


def test_what_a_user_calls_an_image(families: Any) -> None:
    processor = processor_of(families["llava"][0])
    with pytest.raises(ValueError, match="Cache miss for image 'cat', but data is not provided"):
        processor.apply("<image>", [None], uuids=["cat"])
    (first,) = processor.apply("<image>", [picture()], uuids=["cat"])[2]
    # its user vouches for it: it is not looked at
    for later in (None, picture(seed=1)):
        assert processor.apply("<image>", [later], uuids=["cat"])[2] == [first]
    (unnamed,) = processor.apply("<image>", [picture()], uuids=[None])[2]
    (other,) = processor.apply("<image>", [picture()], {"resample": 0}, ["cat"])[2]
    assert len({first.mm_hash, unnamed.mm_hash, other.mm_hash}) == 3


def test_pixels_travel_in_the_models_dtype(families: Any) -> None:
    "Half as many bytes; whole numbers stay what they are."
    folder = families["qwen2_vl"][0]
    whole, half = (
        processor_of(folder, dtype=dtype).apply("<|image_pad|>", [picture()])[2][0]
        for dtype in ("float32", "bfloat16")
    )
    assert isinstance(whole, MultiModalItem) and isinstance(half, MultiModalItem)
    dtype, shape, data = half.features["pixel_values"]
    pixels = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).reshape(shape)
    expected = torch.from_numpy(arrays_of(whole)["pixel_values"].copy())
    assert dtype == "bfloat16" and torch.equal(pixels, expected.bfloat16())
    assert half.features["image_grid_thw"] == whole.features["image_grid_thw"]
    assert half.mm_hash == whole.mm_hash


def test_the_cache_is_bounded(families: Any) -> None:
    folder, _ = families["llava"]
    each = 3 * 56 * 56 * 4 + 16 * len("<image>")
    processor = processor_of(folder, MultiModalConfig(mm_processor_cache_gb=3 * each / 2**30))
    cache = processor.cache
    images = [picture(seed=i) for i in range(5)]
    for image in images[:3]:
        processor.apply("<image>", [image])
    assert len(cache.entries) == 3 and cache.num_bytes == 3 * each
    processor.apply("<image>", [images[0]])  # used last now
    processor.apply("<image><image>", images[3:])
    assert len(cache.entries) == 3 and cache.num_bytes == 3 * each and cache.hits == 1
    processor.apply("<image>", [images[0]])
    assert cache.hits == 2
    none = processor_of(folder, MultiModalConfig(mm_processor_cache_gb=0))
    for _ in range(2):
        none.apply("<image>", [images[0]])
    assert not none.cache.entries and none.cache.hits == 0
    small = ProcessorCache(10)
    small.put("a", next(iter(cache.entries.values())))
    assert not small.entries and small.num_bytes == 0


def test_threads(families: Any) -> None:
    processor = processor_of(families["idefics3"][0])
    images = [picture(70 + i, 45, i) for i in range(4)]
    alone = [processor_of(families["idefics3"][0]).apply("<image>", [one]) for one in images]
    found: dict[int, Any] = {}

    def run(which: int) -> None:
        found[which] = processor.apply("<image>", [images[which % 4]])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(16)] == alone * 4


# Embeddings in place of images


def test_embeddings(families: Any) -> None:
    config = MultiModalConfig(enable_mm_embeds=True)
    processor = processor_of(families["llava"][0], config)
    values = np.random.default_rng(0).standard_normal((5, 32))
    _, ids, items = processor.apply("a <image> b <image>", [values, picture()])
    given, image = items
    assert isinstance(given, PromptEmbedding) and isinstance(image, MultiModalItem)
    token = processor.rules.image_token_id
    assert ids[given.offset : given.offset + 5] == [token] * 5 and ids.count(token) == 21
    assert np.array_equal(
        np.frombuffer(given.values, np.float32), values.astype(np.float32).ravel()
    )
    again = processor.apply("<image>", [torch.tensor(values).bfloat16()])[2][0]
    same = processor.apply("<image>", [torch.tensor(values).bfloat16().float().numpy()])[2][0]
    assert again == same and again.key != given.key
    square = processor_of(families["idefics3"][0], config)
    (one,) = square.apply("<image>", [np.ones((4, 32))])[2]
    assert one.num_tokens == 4
    with pytest.raises(NotSupportedYet, match="of 8 tokens"):
        square.apply("<image>", [np.ones((8, 32))])
    for family in ("qwen2_vl", "gemma3"):
        with pytest.raises(NotSupportedYet, match="image embeddings for"):
            processor_of(families[family][0], config).apply(
                PLACEHOLDERS[family], [np.ones((4, 32))]
            )
    for wrong, words in (
        (np.ones((4, 31)), r"not \[4, 31\]"),
        (np.ones((0, 32)), r"not \[0, 32\]"),
        (np.full((4, 32), np.nan), "not finite"),
    ):
        with pytest.raises(ValueError, match=words):
            processor.apply("<image>", [wrong])
    with pytest.raises(
        ValueError, match="You must set `--enable-mm-embeds` to input `image_embeds`"
    ):
        processor_of(families["llava"][0]).apply("<image>", [np.ones((4, 32))])


# From a prompt to the core


def input_processor(folder: Path, config: Any = None, **options: Any) -> InputProcessor:
    settled = config or MultiModalConfig(enable_mm_embeds=True)
    return InputProcessor(model_config(folder, **options), get_tokenizer(folder), settled)


PLAIN = SamplingParams()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_of_an_engine(families: Any, family: str) -> None:
    folder, reference = families[family]
    process = input_processor(folder)
    text = f"what {PLACEHOLDERS[family]} is\n{PLACEHOLDERS[family]}"
    images = [picture(), picture(31, 200)]
    expected = theirs(reference, text, images)[0]
    read = process.process({"prompt": text, "multi_modal_data": {"image": images}}, PLAIN)
    assert read.token_ids == expected and read.text == text and len(read.mm_items) == 2
    ids = get_tokenizer(folder)(text).input_ids
    by_ids = process.process(
        {"prompt_token_ids": ids, "prompt": "said so", "multi_modal_data": {"image": images}}, PLAIN
    )
    assert by_ids.token_ids == expected and by_ids.mm_items == read.mm_items
    assert by_ids.text == "said so"
    one = process.process(
        {"prompt": PLACEHOLDERS[family], "multi_modal_data": {"image": images[0]}}, PLAIN
    )
    assert one.mm_items[0].mm_hash == read.mm_items[0].mm_hash
    for empty in ({}, {"image": []}, {"image": None}, {"video": []}, None):
        none = process.process({"prompt": "no image", "multi_modal_data": empty}, PLAIN)
        assert not none.mm_items and none.token_ids == get_tokenizer(folder)("no image").input_ids


def test_forms_of_data(families: Any) -> None:
    process = input_processor(families["llava"][0])

    def read(number: int, image: Any, **more: Any) -> Any:
        prompt = {"prompt": "<image>" * number, "multi_modal_data": {"image": image}}
        return process.process(prompt | more, PLAIN)

    array = np.asarray(picture())
    stack = np.stack([array, array])
    expected = read(2, [picture(), picture()]).mm_items
    assert read(2, stack).mm_items == read(2, [array, picture()]).mm_items == expected
    assert read(2, torch.from_numpy(stack.copy())).mm_items == expected
    held = BytesIO()
    picture().save(held, "PNG")
    url = "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()
    assert read(2, [url, held.getvalue()]).mm_items == expected
    vectors = torch.randn(2, 16, 32)
    batch = read(2, vectors)
    assert not batch.mm_items and [one.offset for one in batch.prompt_embeddings] == [1, 17]
    assert read(2, list(vectors)).prompt_embeddings == batch.prompt_embeddings
    named = read(1, picture(), multi_modal_uuids={"image": "cat"})
    assert read(1, [None], multi_modal_uuids={"image": ["cat"]}).mm_items == named.mm_items
    changed = read(1, picture(), mm_processor_kwargs={"resample": 0})
    assert changed.mm_items[0].features != expected[0].features


IMAGE = {"image": picture()}
BAD_PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "<image>", "multi_modal_data": [picture()]}, "must be a dict"),
    ({"prompt": "<image>", "multi_modal_data": {"video": [picture()]}}, r"At most 0 video\(s\)"),
    ({"prompt": "<image>", "multi_modal_data": {"images": picture()}}, r"At most 0 images\(s\)"),
    ({"prompt": "no place", "multi_modal_data": IMAGE}, "Expected there to be 1 prompt updates"),
    ({"prompt": "<image><image>", "multi_modal_data": IMAGE}, "instead found 2"),
    ({"prompt": 7, "multi_modal_data": IMAGE}, "a prompt is a string"),
    ({"multi_modal_data": IMAGE}, "has `prompt` or `prompt_token_ids`"),
    ({"prompt": "<image>", "multi_modal_data": IMAGE, "image": 1}, "not .'prompt'"),
    ({"prompt_token_ids": ["a"], "multi_modal_data": IMAGE}, "whole numbers"),
    ({"prompt": "<image>", "multi_modal_data": {"image": "/etc/passwd"}}, "--allowed-local-media"),
    ({"prompt": "<image>", "multi_modal_data": {"image": b"<svg></svg>"}}, "SVG"),
    ({"prompt": "<image>", "multi_modal_data": {"image": [None]}}, "not NoneType"),
    ({"prompt": "<image>", "multi_modal_data": {"image": Image.new("RGB", (1, 999))}}, "ratio"),
    ({"prompt": "<image> \ud83c", "multi_modal_data": IMAGE}, "Unicode"),
    ({"prompt": "<image>" + "word " * 9000, "multi_modal_data": IMAGE}, "longer than the maximum"),
    (
        {"prompt": "<image>", "multi_modal_data": IMAGE, "mm_processor_kwargs": {"x": 1}},
        "'x' is none of",
    ),
    (
        {
            "prompt": "<image>",
            "multi_modal_data": IMAGE,
            "multi_modal_uuids": {"image": ["a", "b"]},
        },
        "must have same length as data: got 2 uuids vs 1 items",
    ),
    (
        {"prompt": "<image>", "multi_modal_data": IMAGE, "multi_modal_uuids": {"image": [7]}},
        "strings",
    ),
    (
        {"prompt": "<image>", "multi_modal_data": IMAGE, "multi_modal_uuids": ["a"]},
        "must be a dict",
    ),
]


@pytest.mark.parametrize("prompt, words", BAD_PROMPTS)
def test_bad_prompts(families: Any, prompt: Any, words: str) -> None:
    process = input_processor(families["llava"][0])
    with pytest.raises(ValueError, match=words):
        process(prompt, PLAIN)
    fine = {"prompt": "<image>", "multi_modal_data": IMAGE}
    assert len(process.process(fine, PLAIN).mm_items) == 1


def test_images_are_not_cut(families: Any) -> None:
    process = input_processor(families["llava"][0])
    prompt = {"prompt": "<image>", "multi_modal_data": IMAGE}
    with pytest.raises(ValueError, match="truncate_prompt_tokens would cut"):
        process(prompt, SamplingParams(truncate_prompt_tokens=4))


@pytest.fixture(scope="module")
def text_config() -> Any:
    return EngineArgs(load_format="dummy", max_model_len=512).create_engine_config()


def test_a_text_model_takes_no_pictures(text_config: Any) -> None:
    processor = Processor.from_config(text_config)
    prompt = {"prompt": "<image>", "multi_modal_data": IMAGE}
    with pytest.raises(ValueError, match="Your model does not support multi-modal inputs"):
        processor("a", prompt, PLAIN)
    request, _ = processor("a", {"prompt": "<image>", "multi_modal_data": {}}, PLAIN)
    assert request.mm_items == [] and request.prompt_embeddings == []
    assert "teachvllm.multimodal.images" in __import__("sys").modules  # this file has imported it


def test_the_request_has_the_images(families: Any, text_config: Any) -> None:
    folder, reference = families["llava"]
    config = dataclasses.replace(
        text_config,
        model_config=model_config(folder),
        multimodal_config=MultiModalConfig(enable_mm_embeds=True),
    )
    processor = Processor.from_config(config)
    data = {"image": [picture(), np.ones((3, 32)), picture(31, 200)]}
    prompt = {"prompt": "<image> a <image> b <image>", "multi_modal_data": data, "cache_salt": "x"}
    request, text = processor("a", prompt, PLAIN)
    assert text == prompt["prompt"] and request.cache_salt == "x"
    assert [item.num_tokens for item in request.mm_items] == [16, 16]
    assert [one.num_tokens for one in request.prompt_embeddings] == [3]
    assert len(request.prompt_token_ids) == 1 + 16 + 3 + 16 + len(
        processor.tokenizer(" a  b ", add_special_tokens=False).input_ids
    )
    import msgspec

    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=type(request))
    assert decoded.mm_items == request.mm_items


def test_the_request_for_a_vector_has_the_images(families: Any, text_config: Any) -> None:
    from teachvllm.config import PoolerConfig

    pooler = PoolerConfig("LAST", normalize=True, softmax=False, task="embed")
    config = dataclasses.replace(
        text_config,
        model_config=model_config(families["llava"][0], pooler_config=pooler),
        multimodal_config=MultiModalConfig(),
    )
    prompt = {"prompt": "<image>", "multi_modal_data": IMAGE}
    request, _ = Processor.from_config(config)("a", prompt, PoolingParams())
    assert len(request.mm_items) == 1


# Chats


def as_url(image: Image.Image) -> str:
    held = BytesIO()
    image.save(held, "PNG")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()


def chat_of(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def url_part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation(families: Any, family: str) -> None:
    "The same ids as transformers makes of its template's text."
    folder, reference = families[family]
    process = input_processor(folder)
    images = [picture(), picture(31, 200)]
    messages = [
        {"role": "system", "content": "yes or no"},
        *chat_of(text_part("is\n"), url_part(as_url(images[0])), text_part("\n\nred, or\n")),
        {"role": "assistant", "content": "yes"},
        *chat_of(url_part(as_url(images[1])), text_part("blue ?")),
    ]
    read = process.process(process.read_chat(messages), PLAIN)
    plain = [
        {**message, "content": [text_part(message["content"])]}
        if isinstance(message["content"], str)
        else message
        for message in messages
    ]
    as_theirs = [
        {
            **message,
            "content": [
                {"type": "image"} if part["type"] == "image_url" else part
                for part in message["content"]
            ],
        }
        for message in plain
    ]
    text = get_tokenizer(folder).apply_chat_template(
        as_theirs, tokenize=False, add_generation_prompt=True
    )
    assert text.count(PLACEHOLDERS[family]) == 2
    expected, _ = theirs(reference, text, images, add_special_tokens=False)
    assert read.token_ids == expected
    assert [item.mm_hash for item in read.mm_items] == [
        process.process(
            {"prompt": PLACEHOLDERS[family], "multi_modal_data": {"image": image}}, PLAIN
        )
        .mm_items[0]
        .mm_hash
        for image in images
    ]
    alone = process.read_chat(messages[:1])
    assert "multi_modal_data" not in alone


def test_a_template_that_takes_a_string(families: Any) -> None:
    "Its images come first, as in vLLM, unless the text says where they are."
    tokenizer = get_tokenizer(families["llava"][0])
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    printing = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert not takes_parts(tokenizer, template) and not takes_parts(tokenizer, printing)
    assert takes_parts(tokenizer, tokenizer.chat_template)

    def text(*parts: Any) -> str:
        return render_chat(tokenizer, chat_of(*parts), template, {}, "<image>")

    image = {"type": "image", "image": picture()}
    assert text(text_part("a"), image, text_part("b"), image) == "user: <image>\n<image>\na\nb"
    assert text(text_part("a <image> b"), image) == "user: a <image> b"
    assert text(text_part("a <image> b"), image, image) == "user: <image>\na <image> b"
    with pytest.raises(ValueError, match="Found more '<image>' placeholders in input prompt"):
        text(text_part("<image> <image>"), image)
    process = input_processor(families["llava"][0])
    for part in (
        {"type": "image_pil", "image_pil": picture()},
        {"type": "image_url", "image_url": as_url(picture())},
        {"type": "input_image", "image_url": as_url(picture())},
        {"type": "image", "image": picture()},
        {"type": "image", "url": as_url(picture())},
        {"type": "image_embeds", "image_embeds": np.ones((16, 32))},
    ):
        prompt = process.read_chat(chat_of(part, text_part("b")), template)
        read = process.process(prompt, PLAIN)
        assert len(read.mm_items) + len(read.prompt_embeddings) == 1
        assert read.token_ids.count(process.multimodal.rules.image_token_id) == 16
    with pytest.raises(ValueError, match="has no image"):
        process.read_chat(chat_of({"type": "image"}))
    with pytest.raises(NotSupportedYet, match="'video_url'"):
        process.read_chat(chat_of({"type": "video_url", "video_url": {"url": "x"}}))


# The server


def reader_of(folder: Path, config: Any = None) -> PromptReader:
    process = input_processor(folder, config)
    reader = PromptReader(process.model_config, process.tokenizer, None, False, 8)
    reader.input_processor = process
    return reader


def ask(reader: PromptReader, *parts: Any, **more: Any) -> Any:
    body = {"messages": chat_of(*parts)} | more
    request = ChatCompletionRequest.model_validate_json(json.dumps(body))

    async def run() -> Any:
        return reader.cut_chat(await reader.read_messages(request), request)

    return asyncio.run(run())


def test_the_server_reads_images(families: Any) -> None:
    reader = reader_of(families["llava"][0])
    url = url_part(as_url(picture()))
    prompt = ask(reader, url, text_part("what ?"))
    read = reader.input_processor.process(prompt, PLAIN)
    assert read is prompt["processed"] and len(read.mm_items) == 1
    assert prompt["prompt_token_ids"] == read.token_ids
    assert len(repr(prompt)) < 2000  # a log line
    detail = {"type": "image_url", "image_url": {"url": as_url(picture()), "detail": "low"}}
    assert ask(reader, detail, text_part("what ?"))["prompt_token_ids"] == read.token_ids
    changed = ask(reader, url, mm_processor_kwargs={"resample": 0})
    assert changed["processed"].mm_items[0] != read.mm_items[0]
    assert "processed" not in ask(reader, text_part("no image"))
    tokens = TokenizeRequest(messages=chat_of(url, text_part("what ?")))
    assert asyncio.run(reader.read_messages(tokens))["prompt_token_ids"] == read.token_ids
    salted = reader.input_processor.process(prompt | {"cache_salt": "x"}, PLAIN)
    assert salted is read


BAD_CHATS: list[tuple[list[Any], dict[str, Any], str]] = [
    ([url_part("file:///etc/passwd")], {}, "--allowed-local-media-path"),
    ([url_part("/etc/passwd")], {}, "--allowed-local-media-path"),
    ([url_part("http://127.0.0.1:1/a.png")], {}, "private address"),
    ([url_part("http://169.254.169.254/")], {}, "private address"),
    ([url_part("data:image/png;base64,AAAA")], {}, "Failed to load image"),
    ([url_part("data:image/svg+xml;base64,PHN2Zz48L3N2Zz4=")], {}, "SVG"),
    ([url_part("ftp://a/b")], {}, "must be either a HTTP, data or file URL"),
    ([url_part("")], {}, "--allowed-local-media-path"),
    ([url_part(as_url(picture()))] * 3, {}, r"At most 2 image\(s\) may be provided in one prompt"),
    ([url_part(as_url(picture())), text_part("<image>")], {}, "instead found 2 prompt updates"),
    ([url_part(as_url(picture()))], {"mm_processor_kwargs": {"a": 1}}, "'a' is none of"),
    ([url_part(as_url(picture()))], {"chat_template_kwargs": {"image_placeholder": 1}}, "variable"),
    ([url_part(as_url(picture()))], {"truncate_prompt_tokens": 5}, "would cut"),
    ([{"type": "image_url"}], {}, "has no image_url"),
    ([{"type": "image_url", "image_url": {}}], {}, "url"),
    ([{"type": "image_url", "image_url": {"url": 7}}], {}, "url"),
    ([{"type": "image_url", "image_url": {"url": None}}], {}, "url"),
    ([{"type": "video_url", "video_url": {"url": "x"}}], {}, "only text and image_url"),
    ([{"type": "image_embeds", "image_embeds": "x"}], {}, "only text and image_url"),
]


@pytest.mark.parametrize("parts, more, words", BAD_CHATS)
def test_bad_chats(families: Any, parts: Any, more: Any, words: str) -> None:
    config = MultiModalConfig(limit_mm_per_prompt={"image": 2})
    reader = reader_of(families["llava"][0], config)
    with pytest.raises((ValueError, RequestError), match=words):
        ask(reader, *parts, **more)
    assert "processed" in ask(reader, url_part(as_url(picture())))


def test_other_requests_do_not_wait_for_images(
    families: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = reader_of(families["llava"][0])
    may_go = threading.Event()
    process = reader.input_processor.process

    def slow(prompt: Any, params: Any) -> Any:
        assert may_go.wait(20)
        return process(prompt, params)

    monkeypatch.setattr(reader.input_processor, "process", slow)

    def request(*parts: Any) -> Any:
        return ChatCompletionRequest(messages=chat_of(*parts))

    async def run() -> Any:
        image = asyncio.create_task(reader.read_messages(request(url_part(as_url(picture())))))
        text = await reader.read_messages(request(text_part("a")))
        assert not image.done()
        may_go.set()
        return text, await image

    text, image = asyncio.run(run())
    assert "processed" in image and "processed" not in text


# Configuration


def test_arguments() -> None:
    seeing = SimpleNamespace(vision_config=object())
    args = EngineArgs(
        limit_mm_per_prompt={"image": 2},
        mm_processor_kwargs={"do_normalize": False},
        mm_processor_cache_gb=0.5,
        disable_chunked_mm_input=True,
        allowed_media_domains=["example.com"],
        enable_mm_embeds=True,
    )
    config = create_multimodal_config(args, seeing)
    assert config == MultiModalConfig(
        {"image": 2}, {"do_normalize": False}, 0.5, True, "", ["example.com"], True
    )
    assert create_multimodal_config(EngineArgs(), seeing) == MultiModalConfig()
    older = create_multimodal_config(EngineArgs(disable_mm_preprocessor_cache=True), seeing)
    assert older is not None and older.mm_processor_cache_gb == 0
    assert create_multimodal_config(EngineArgs(), SimpleNamespace()) is None
    for wrong in (
        {"limit_mm_per_prompt": {"image": 2}},
        {"mm_processor_kwargs": {"a": 1}},
        {"disable_mm_preprocessor_cache": True},
    ):
        says = f"`{next(iter(wrong))}` is only supported for multimodal models."
        with pytest.raises(ValueError, match=says):
            EngineArgs(load_format="dummy", **wrong).create_engine_config()


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"limit_mm_per_prompt": 2}, "must be a dict"),
    ({"limit_mm_per_prompt": {"picture": 2}}, "'picture' is none of"),
    ({"limit_mm_per_prompt": {"image": -1}}, "must be 0 or more"),
    ({"limit_mm_per_prompt": {"image": True}}, "must be 0 or more"),
    ({"limit_mm_per_prompt": {"image": {"count": "a"}}}, "must be 0 or more"),
    ({"mm_processor_kwargs": [1]}, "must be a dict"),
    ({"mm_processor_cache_gb": -1}, "must not be negative"),
    ({"allowed_local_media_path": "/no/such/folder"}, "does not exist"),
    ({"allowed_local_media_path": __file__}, "must be a directory"),
    ({"allowed_media_domains": "example.com"}, "must be a list"),
    ({"mm_encoder_cache_tokens": 0}, "must be positive"),
]


@pytest.mark.parametrize("fields, words", BAD_CONFIGS)
def test_bad_configurations(fields: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MultiModalConfig(**fields)
