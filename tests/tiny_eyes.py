"""Tiny models that see: each a folder with configuration, tokenizer and processor, as transformers'
save_pretrained writes them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors as post
from tokenizers.trainers import BpeTrainer
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Idefics3Config,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
    SmolVLMConfig,
    SmolVLMImageProcessorPil,
)

from teachvllm.config import ModelConfig

FAMILIES = ("llava", "idefics3", "smolvlm", "qwen2_vl", "gemma3")
PLACEHOLDERS = {
    "llava": "<image>",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
}
WORDS = "what is in this picture ? a red circle , and \n\n the blue square . \n Answer: yes no user"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}\n{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}PLACE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"
)


def special(*names: str) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in names]


def byte_tokenizer(*names: str, **options: Any) -> PreTrainedTokenizerFast:
    "Byte-level BPE, as Qwen2's and SmolLM's, with a token at the beginning."
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    core.train_from_iterator([WORDS] * 3, trainer)
    core.add_special_tokens(special("<s>", "</s>", *names))
    core.post_processor = post.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>", **options
    )


def newline_tokenizer(*names: str, **options: Any) -> PreTrainedTokenizerFast:
    "As Gemma's: nothing is split before BPE, and runs of line breaks are tokens."
    letters = ["▁", "\n", *map(chr, range(33, 127))]
    runs = ["\n" * number for number in range(2, 7)]
    merges = [("\n" * (number - 1), "\n") for number in range(2, 7)]
    tokens = ["<unk>", "<bos>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [*letters, *runs]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    core.add_special_tokens(special("<unk>", "<bos>", "<eos>", *names))
    core.post_processor = post.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>",
        unk_token="<unk>",
        **options,
    )


TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 14,
}


def llava() -> tuple[Any, Any]:
    tokenizer = byte_tokenizer("<image>")
    image_processor = CLIPImageProcessorPil(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
    )
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION, image_size=56, projection_dim=32).to_dict(),
        text_config=LlamaConfig(**TEXT, vocab_size=len(tokenizer)).to_dict(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        architectures=["LlavaForConditionalGeneration"],
    )
    processor = LlavaProcessor(
        image_processor,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return config, processor


def idefics3(
    config_class: Any = Idefics3Config, image_processor_class: Any = Idefics3ImageProcessorPil
) -> tuple[Any, Any]:
    squares = [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]
    tokenizer = byte_tokenizer(
        "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *squares
    )
    image_processor = image_processor_class(
        size={"longest_edge": 168}, max_image_size={"longest_edge": 56}
    )
    model = config_class.__name__.removesuffix("Config")
    config = config_class(
        vision_config={**VISION, "image_size": 56},
        text_config=LlamaConfig(**TEXT, vocab_size=len(tokenizer)).to_dict(),
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        architectures=[f"{model}ForConditionalGeneration"],
    )
    return config, Idefics3Processor(image_processor, tokenizer, image_seq_len=4)


def smolvlm() -> tuple[Any, Any]:
    return idefics3(SmolVLMConfig, SmolVLMImageProcessorPil)


class Qwen2VLImages(Qwen2VLProcessor):
    "Without videos, for which transformers needs torchvision."

    def __init__(self, image_processor: Any, tokenizer: Any):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(
            [self.image_token, self.video_token]
        )
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.chat_template = None

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]

    @property
    def model_input_names(self) -> list[str]:
        return []


def qwen2_vl() -> tuple[Any, Any]:
    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer = byte_tokenizer(*names)
    ids = tokenizer.convert_tokens_to_ids
    image_processor = Qwen2VLImageProcessorPil(min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 64)
    config = Qwen2VLConfig(
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 4,
            "mlp_ratio": 2,
            "patch_size": 14,
        },
        text_config={
            **TEXT,
            "vocab_size": len(tokenizer),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 2],
            },
        },
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        architectures=["Qwen2VLForConditionalGeneration"],
    )
    return config, Qwen2VLImages(image_processor, tokenizer)


def gemma3() -> tuple[Any, Any]:
    extra = {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    tokenizer = newline_tokenizer(*extra.values(), extra_special_tokens=extra)
    ids = tokenizer.convert_tokens_to_ids
    image_processor = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    config = Gemma3Config(
        vision_config={**VISION, "image_size": 56, "vision_use_head": False},
        text_config={
            **TEXT,
            "vocab_size": len(tokenizer),
            "head_dim": 8,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 1,  # attention that is not flat
        },
        mm_tokens_per_image=4,
        boi_token_index=ids("<start_of_image>"),
        eoi_token_index=ids("<end_of_image>"),
        image_token_index=ids("<image_soft_token>"),
        architectures=["Gemma3ForConditionalGeneration"],
    )
    return config, Gemma3Processor(image_processor, tokenizer, image_seq_length=4)


def save_family(family: str, folder: Path, made: Any = None) -> tuple[Path, Any]:
    """A folder with the model's files but its weights; and transformers' own processor. `made`: another
    configuration and processor of the family.
    """
    config, processor = made or globals()[family]()
    template = TEMPLATE.replace("PLACE", PLACEHOLDERS[family])
    processor.tokenizer.chat_template = template
    processor.chat_template = template
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    if family == "qwen2_vl":
        processor.image_processor.save_pretrained(folder)
    else:
        processor.save_pretrained(folder)
    return folder, processor


def model_config(folder: Path, **options: Any) -> ModelConfig:
    "The configuration of such a folder's model."
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(folder)
    text = hf_config.get_text_config()
    for name in ("max_position_embeddings", "vocab_size", "hidden_size"):
        if not hasattr(hf_config, name):
            setattr(hf_config, name, getattr(text, name))
    settled = {"max_model_len": 2048} | options
    return ModelConfig(str(folder), folder, hf_config, folder, **settled)


def put(part: str, **fields: Any) -> Callable[[Any], Any]:
    "What changes these fields of a configuration, or of a part of it."

    def change(hf_config: Any) -> Any:
        for name, value in fields.items():
            setattr(getattr(hf_config, part) if part else hf_config, name, value)
        return hf_config

    return change
