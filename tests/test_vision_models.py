"""Models that see: the rows that they make of pictures are transformers', and so are the tokens that
the engine writes with them. Tiny models with random weights, in float32.
"""

import json
import logging
import pickle
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import VOCAB
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_eyes import put, save_family
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    GraniteConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    OPTConfig,
    PixtralVisionConfig,
    Qwen2Config,
    SiglipVisionConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig
from transformers.utils import logging as hf_logging

from teachvllm import LLM, EngineArgs, SamplingParams
from teachvllm.config import NotSupportedYet
from teachvllm.distributed.parallel_state import ParallelState, run_ranks
from teachvllm.lora.layers import linear_places
from teachvllm.messages import LoRARequest, PromptEmbedding
from teachvllm.model_executor.layers import LinearBase, WeightsError
from teachvllm.model_executor.loader import get_model, make_context
from teachvllm.model_executor.models.llava import pixel_shuffle
from teachvllm.multimodal.vision import fractional_positions, patchify, state_numbers

hf_logging.disable_progress_bar()
IMAGE = 3  # the placeholder's token id
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 6,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def llava(vision: Any = None, text: Any = None, **more: Any) -> Any:
    "A tiny LLaVA that transformers makes."
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision or CLIPVisionConfig(**VISION),
            text_config=text or LlamaConfig(**TEXT),
            image_token_index=IMAGE,
            **more,
        )
    )


def idefics3(text: Any = None, **more: Any) -> Any:
    "A tiny Idefics3."
    return Idefics3ForConditionalGeneration(
        Idefics3Config(
            vision_config=Idefics3VisionConfig(**VISION),
            text_config=text or LlamaConfig(**TEXT),
            image_token_id=IMAGE,
            pad_token_id=0,
            **more,
        )
    )


def smolvlm(**more: Any) -> Any:
    "A tiny SmolVLM."
    return SmolVLMForConditionalGeneration(
        SmolVLMConfig(
            vision_config=SmolVLMVisionConfig(**VISION),
            text_config=LlamaConfig(**TEXT),
            image_token_id=IMAGE,
            pad_token_id=0,
            **more,
        )
    )


def opt() -> Any:
    return OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
        tie_word_embeddings=False,
    )


MODELS: dict[str, Callable[[], Any]] = {
    "llava": llava,
    "llava, last layer": lambda: llava(vision_feature_layer=-1),
    "llava, two layers, whole": lambda: llava(
        vision_feature_layer=[0, -2], vision_feature_select_strategy="full"
    ),
    "llava, siglip": lambda: llava(
        SiglipVisionConfig(**VISION),
        vision_feature_select_strategy="full",
        multimodal_projector_bias=False,
    ),
    "llava, qwen2, tied": lambda: llava(
        text=Qwen2Config(**TEXT, tie_word_embeddings=True), tie_word_embeddings=True
    ),
    "llava, opt": lambda: llava(text=opt()),
    "idefics3": idefics3,
    "idefics3, scale 4, tied": lambda: idefics3(scale_factor=4, tie_word_embeddings=True),
    "idefics3, tied in the text only": lambda: idefics3(
        LlamaConfig(**TEXT, tie_word_embeddings=True)
    ),
    "smolvlm": smolvlm,
}


def made(name: str) -> Any:
    "transformers' model."
    torch.manual_seed(0)
    return filled(MODELS[name]().eval().float())


def filled(model: Any) -> Any:
    "The model with weights so large that no two tokens tie."
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            parameter.data += 1
    model.get_input_embeddings().weight.data *= 3
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Any]]:
    "By name: the folder, and transformers' model."
    found: dict[str, tuple[str, Any]] = {}

    def model(name: str) -> tuple[str, Any]:
        if name not in found:
            path = tmp_path_factory.mktemp("model")
            hf_model = made(name)
            hf_model.save_pretrained(path)
            found[name] = str(path), hf_model
        return found[name]

    return model


def pictures(name: str, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    "Three images: the features of each, as the model's processor names them."
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    if name.startswith("llava"):
        return [{"pixel_values": random(1, 3, 24, 24)} for _ in range(3)]
    mask = torch.ones(2, 48, 48, dtype=torch.int64)
    mask[0, 31:] = 0
    mask[1, :, 20:] = 0
    return [
        {"pixel_values": random(1, 3, 3, 24, 24)},
        {"pixel_values": random(1, 2, 3, 48, 48), "pixel_attention_mask": mask[None]},
        {"pixel_values": random(1, 1, 3, 24, 24)},
    ]


@torch.inference_mode()
def theirs(hf_model: Any, features: dict[str, torch.Tensor]) -> torch.Tensor:
    "transformers' rows of one image."
    found = hf_model.get_image_features(**features, return_dict=True).pooler_output
    return torch.cat(list(found))


def config_of(path: str, **more: Any) -> Any:
    options = {"dtype": "float32", "device": "cpu", "block_size": 4, **more}
    return EngineArgs(path, skip_tokenizer_init=True, **options).create_engine_config()


def load(path: str, parallel: ParallelState = ParallelState(), **more: Any) -> Any:
    "Our model, as the worker loads it."
    config = config_of(path, **more)
    return get_model(config, make_context(config, parallel))


def test_patches_are_cut_row_by_row() -> None:
    images = torch.arange(2 * 3 * 13 * 9.0).view(2, 3, 13, 9)
    patches = patchify(images, 4)
    assert patches.shape == (2, 6, 48)
    for row in range(3):
        for column in range(2):
            cut = images[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            assert torch.equal(patches[:, 2 * row + column], cut.flatten(1))


def test_which_hidden_states_are_asked_for() -> None:
    assert state_numbers(-2, 3) == [2] and state_numbers([0, -1, 1], 3) == [0, 3, 1]
    for asked in (4, -5, [0, 9]):
        with pytest.raises(ValueError, match=r"vision_feature_layer=.* has 3 layers"):
            state_numbers(asked, 3)


def test_positions_of_a_picture_of_the_usual_size_are_its_numbers() -> None:
    assert fractional_positions(torch.ones(1, 4, 4) > 0, 4)[0].tolist() == list(range(16))
    seen = torch.zeros(1, 3, 3) > 0
    seen[0, :2, :2] = True
    assert fractional_positions(seen, 4)[0].tolist() == [0, 2, 0, 8, 10, 0, 0, 0, 0]


def test_a_pixel_shuffle_needs_a_square() -> None:
    x = torch.arange(16.0).view(1, 16, 1)
    assert pixel_shuffle(x, 2)[0, 1].tolist() == [2, 3, 6, 7]
    for patches, scale in ((15, 2), (16, 3), (8, 2)):
        with pytest.raises(ValueError, match=f"{patches} patches .* scale_factor={scale}"):
            pixel_shuffle(torch.zeros(1, patches, 1), scale)


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_rows_are_those_of_transformers(
    models: Callable[[str], tuple[str, Any]], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    "Of images alone and together; every tensor of the checkpoint has its place."
    path, hf_model = models(name)
    with caplog.at_level(logging.WARNING, "teachvllm"):
        model = load(path)
    assert not caplog.records
    items = pictures(name)
    wanted = [theirs(hf_model, features) for features in items]
    together = model.get_multimodal_embeddings(items)
    assert len(together) == 3 and not torch.allclose(wanted[0][:4], wanted[2][:4])
    for features, rows, right in zip(items, together, wanted, strict=True):
        (alone,) = model.get_multimodal_embeddings([features])
        assert rows.shape == right.shape == alone.shape
        assert right.abs().max() > 1
        for ours in (rows, alone):
            assert (ours - right).abs().max() < 1e-5 * right.abs().max()
    assert model.get_multimodal_embeddings([]) == []


@contextmanager
def engine(path: str, **options: Any) -> Any:
    options = {"num_gpu_blocks_override": 80, "block_size": 4, "max_num_seqs": 8, **options}
    with LLM(path, dtype="float32", device="cpu", skip_tokenizer_init=True, **options) as llm:
        yield llm


def prompt_of(rows: list[int], seed: int) -> tuple[list[int], list[int]]:
    "A text with a run of placeholders for each image, and where these begin."
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    places = []
    for count in rows:
        ids += torch.randint(5, VOCAB, (3,), generator=generator).tolist()
        places.append(len(ids))
        ids += [IMAGE] * count
    return ids + torch.randint(5, VOCAB, (4,), generator=generator).tolist(), places


@torch.inference_mode()
def expected(hf_model: Any, ids: list[int], items: list[dict[str, torch.Tensor]]) -> list[int]:
    "transformers' greedy tokens, which reads the pictures by itself."
    features: dict[str, Any] = {}
    if items and items[0]["pixel_values"].dim() == 4:
        features["pixel_values"] = torch.cat([one["pixel_values"] for one in items])
    elif items:
        (features,) = items  # those of several sizes cannot be one batch there
    out = hf_model.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=[10**9],
        pad_token_id=0,
        **features,
    )
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("budget", [64, 7])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(
    models: Callable[[str], tuple[str, Any]], name: str, budget: int
) -> None:
    "With none, one and several images, side by side; whole prompts, and chunks that end in an image."
    path, hf_model = models(name)
    items = pictures(name)
    chosen = [[], items[:1], items[1:2], items[2:]]
    if name.startswith("llava"):
        chosen.append(items[1:])
    with engine(path, max_num_batched_tokens=budget, max_model_len=64) as llm:
        core = llm.llm_engine.engine_core.engine_core
        (rows,) = llm.apply_model(lambda model: model.get_multimodal_embeddings(items))
        prompts = {}
        embeddings = {}
        for i, pictured in enumerate(chosen):
            own = [rows[j] for one in pictured for j, two in enumerate(items) if one is two]
            prompts[str(i)], places = prompt_of([len(one) for one in own], seed=i)
            embeddings[str(i)] = [
                PromptEmbedding(place, "", one.numpy().tobytes(), len(one))
                for place, one in zip(places, own, strict=True)
            ]
        core.preparers.append(
            lambda request, group: setattr(
                group.first_seq, "prompt_embeddings", embeddings[request.request_id]
            )
        )
        for i, ids in prompts.items():
            llm.llm_engine.add_request(i, ids, GREEDY)
        done = {}
        while llm.llm_engine.has_unfinished_requests():
            done |= {o.request_id: o for o in llm.llm_engine.step() if o.finished}
    for i, pictured in enumerate(chosen):
        tokens = list(done[str(i)].outputs[0].token_ids)
        assert tokens == expected(hf_model, prompts[str(i)], pictured), i
    # the pictures matter
    assert expected(hf_model, prompts["3"], pictures(name, 1)[2:]) != list(
        done["3"].outputs[0].token_ids
    )


def older(name: str) -> str:
    "What versions before 4.52 called a tensor of a LLaVA that today's call `name`."
    return name.replace("vision_tower.", "vision_tower.vision_model.")


LAYOUTS: dict[str, Callable[[dict[str, Any], Any], dict[str, Any]]] = {
    "of the model in memory": lambda saved, hf_model: hf_model.state_dict(),
    "with a class around the tower": lambda saved, hf_model: (
        {older(name): tensor for name, tensor in saved.items()}
        | {"vision_tower.vision_model.embeddings.position_ids": torch.arange(17)[None]}
    ),
    "both": lambda saved, hf_model: {
        older(name): tensor for name, tensor in hf_model.state_dict().items()
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_names_of_other_versions(
    models: Callable[[str], tuple[str, Any]],
    layout: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path, hf_model = models("llava")
    saved = load_file(Path(path) / "model.safetensors")
    names = LAYOUTS[layout](saved, hf_model)
    assert set(names) != set(saved)
    (tmp_path / "config.json").write_text((Path(path) / "config.json").read_text())
    save_file(
        {name: tensor.contiguous() for name, tensor in names.items()},
        tmp_path / "model.safetensors",
    )
    with caplog.at_level(logging.WARNING, "teachvllm"):
        model = load(str(tmp_path))
    assert not caplog.records
    first = load(path)
    states = [dict(one.named_parameters()) for one in (model, first)]
    assert states[0].keys() == states[1].keys()
    items = pictures("llava")
    for rows, same in zip(
        model.get_multimodal_embeddings(items), first.get_multimodal_embeddings(items), strict=True
    ):
        assert torch.equal(rows, same)


@pytest.mark.parametrize("name", ["llava", "smolvlm"])
@torch.inference_mode()
def test_the_tower_is_whole_on_every_rank(
    models: Callable[[str], tuple[str, Any]], name: str
) -> None:
    "The language model is shared; of a pipeline, the first stage alone sees."
    path, _ = models(name)
    (wanted,) = load(path).get_multimodal_embeddings(pictures(name)[:1])

    def rows(parallel: ParallelState) -> Any:
        model = load(path, parallel)
        sizes = sum(p.nbytes for n, p in model.named_parameters() if "language_model" in n)
        if not parallel.is_first_stage:
            assert not any(model.encoder_modules[0] in n for n, _ in model.named_parameters())
            return None, sizes
        return model.get_multimodal_embeddings(pictures(name)[:1])[0], sizes

    ((_, whole),) = run_ranks(rows, 1)
    for found, size in run_ranks(rows, 2):
        assert torch.equal(found, wanted) and size < whole
    (first, _), (last, _) = run_ranks(rows, 1, 2)
    assert torch.equal(first, wanted) and last is None


@torch.inference_mode()
def test_a_configuration_that_crossed_to_another_process(
    models: Callable[[str], tuple[str, Any]],
) -> None:
    "It is plain there, with its parts."
    for name in ("llava", "smolvlm"):
        path, _ = models(name)
        config = pickle.loads(pickle.dumps(config_of(path)))
        model = get_model(config, make_context(config))
        (rows,) = model.get_multimodal_embeddings(pictures(name)[:1])
        assert torch.equal(rows, load(path).get_multimodal_embeddings(pictures(name)[:1])[0])
        assert type(config.model_config.hf_config).__name__ == "PlainConfig"


def test_what_the_engine_counts_is_the_text_part(
    models: Callable[[str], tuple[str, Any]],
) -> None:
    path, _ = models("smolvlm")
    model = config_of(path).model_config
    assert (model.num_layers, model.hidden_size, model.vocab_size) == (2, 32, VOCAB)
    assert (model.num_attention_heads, model.num_kv_heads, model.head_size) == (4, 2, 8)
    assert model.max_model_len == 128 and model.hf_config.eos_token_id == 2
    changed = {"text_config": {"max_position_embeddings": 64}}
    assert config_of(path, hf_overrides=changed).model_config.max_model_len == 64
    with pytest.raises(ValueError, match="hf_overrides: .* no 'num_wings'"):
        config_of(path, hf_overrides={"text_config": {"num_wings": 2}})


@torch.inference_mode()
def test_only_the_language_model_is_rounded(models: Callable[[str], tuple[str, Any]]) -> None:
    "And only it takes adapters."
    path, _ = models("llava")
    model = load(path, quantization="int8")
    kinds: dict[str, set[str]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            part = name.partition(".")[0]
            kinds.setdefault(part, set()).add(type(layer.linear_method).__name__)
    plain = {"UnquantizedLinearMethod"}
    assert kinds.pop("language_model") != plain
    assert kinds == {"vision_tower": plain, "multi_modal_projector": plain}
    items = pictures("llava")[:1]
    assert torch.equal(
        model.get_multimodal_embeddings(items)[0], load(path).get_multimodal_embeddings(items)[0]
    )
    places = linear_places(model)
    assert "language_model.model.layers.0.self_attn.q_proj" in places
    assert all(name.startswith("language_model.") for name in places)


WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception]]] = {
    "model_type='pixtral'": (put("", vision_config=PixtralVisionConfig()), NotSupportedYet),
    "image_size=.24, 30.: only squares": (
        put("vision_config", image_size=[24, 30]),
        NotSupportedYet,
    ),
    "num_attention_heads=7": (put("vision_config", num_attention_heads=7), ValueError),
    "hidden_act .* 'sigh'": (put("vision_config", hidden_act="sigh"), ValueError),
    "'sigh'": (put("", projector_hidden_act="sigh"), ValueError),
    "vision_feature_layer=-9": (put("", vision_feature_layer=-9), ValueError),
    "GraniteForCausalLM is not supported": (
        put("", text_config=GraniteConfig(**TEXT)),
        ValueError,
    ),
}


@pytest.mark.parametrize("why", WRONG)
def test_what_is_not_served_is_refused_by_name(
    models: Callable[[str], tuple[str, Any]], why: str
) -> None:
    change, error = WRONG[why]
    config = config_of(models("llava")[0], hf_overrides=change)
    with pytest.raises(error, match=why):
        get_model(config, make_context(config))


@torch.inference_mode()
def test_pictures_of_a_wrong_size(models: Callable[[str], tuple[str, Any]]) -> None:
    model = load(models("llava")[0])
    with pytest.raises(ValueError, match=r"24 x 30 pixels, .*image_size=24"):
        model.get_multimodal_embeddings([{"pixel_values": torch.zeros(1, 3, 24, 30)}])
    model = load(models("smolvlm")[0])
    with pytest.raises(ValueError, match="20 patches are no square"):
        model.get_multimodal_embeddings([{"pixel_values": torch.zeros(1, 1, 3, 24, 30)}])


@pytest.mark.parametrize("missing", ["vision_tower.embeddings.class", "multi_modal_projector"])
def test_a_checkpoint_that_lacks_a_part(
    models: Callable[[str], tuple[str, Any]], missing: str, tmp_path: Path
) -> None:
    path, _ = models("llava")
    saved = load_file(Path(path) / "model.safetensors")
    kept = {name: tensor for name, tensor in saved.items() if not name.startswith(missing)}
    assert len(kept) < len(saved)
    (tmp_path / "config.json").write_text((Path(path) / "config.json").read_text())
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=f"lacks .*{missing}"):
        load(str(tmp_path))


# From a picture to tokens


@pytest.mark.parametrize("family", ["llava", "idefics3", "smolvlm"])
@torch.inference_mode()
def test_a_picture_becomes_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    "Through processor, encoder's cache and model: none, one and three images of odd sizes."
    folder, processor = save_family(family, tmp_path / family)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    hf_model = filled(AutoModelForImageTextToText.from_config(config).eval().float())
    hf_model.save_pretrained(folder)
    rng = np.random.default_rng(0)
    sizes = ((40, 70), (101, 30), (56, 56))
    images = [Image.fromarray(rng.integers(0, 256, (*s, 3), dtype=np.uint8)) for s in sizes]
    prompts: list[tuple[str, list[Any]]] = [
        ("what is in this picture ?", []),
        ("<image>what is it ?", images[:1]),
        ("<image>what is it ?", images[1:2]),
        ("a <image> and <image> or <image> ?", images),
    ]
    options: dict[str, Any] = {"limit_mm_per_prompt": {"image": 3}, "max_num_batched_tokens": 96}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(
        str(folder),
        dtype="float32",
        device="cpu",
        num_gpu_blocks_override=200,
        block_size=4,
        max_model_len=512,
        **options,
    ) as llm:
        outputs = llm.generate(
            [{"prompt": text, "multi_modal_data": {"image": some}} for text, some in prompts],
            params,
            use_tqdm=False,
        )
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    for (text, some), output, found in zip(prompts, outputs, tokens, strict=True):
        inputs = processor(text=[text], images=[some] if some else None, return_tensors="pt")
        assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
        out = hf_model.generate(
            **inputs,
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=[10**9],
            pad_token_id=0,
        )
        assert found == out[0, inputs["input_ids"].shape[1] :].tolist(), text
    assert tokens[1] != tokens[2]


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@torch.inference_mode()
def test_an_adapter_changes_the_language_model_alone(
    models: Callable[[str], tuple[str, Any]],
    prefix: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    "By the names of either version; its part for the tower is passed over, with a warning."
    path, _ = models("llava")
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    added = {}
    for i in range(2):
        name = f"{prefix}layers.{i}.self_attn.q_proj"
        a = torch.randn(4, 32, generator=generator)
        b = torch.randn(32, 4, generator=generator)
        added[i] = 2 * b @ a
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    tower = "base_model.model.vision_tower.encoder.layers.0.self_attn.q_proj"
    tensors[f"{tower}.lora_A.weight"] = torch.randn(4, 24, generator=generator)
    tensors[f"{tower}.lora_B.weight"] = torch.randn(24, 4, generator=generator)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({**fields, "target_modules": ["q_proj"]})
    )
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    changed = made("llava")
    for i, layer in enumerate(changed.model.language_model.layers):
        layer.self_attn.q_proj.weight += added[i]
    ids = [11, 12, 13, 14]
    with caplog.at_level(logging.WARNING, "teachvllm"), engine(path, enable_lora=True) as llm:
        request = LoRARequest("one", 1, str(tmp_path))
        outputs = [
            llm.generate([ids], GREEDY, lora_request=one, use_tqdm=False)[0]
            for one in (None, request)
        ]
    assert "1 modules are not in the model" in caplog.text
    plain, adapted = (list(output.outputs[0].token_ids) for output in outputs)
    assert adapted == expected(changed, ids, []) != plain == expected(made("llava"), ids, [])
