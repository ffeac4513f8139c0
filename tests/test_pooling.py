"""Embeddings, labels and scores equal transformers', whatever the chunks, batches, caches,
preemptions and ranks.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from helpers import TINY, VOCAB, random_prompts
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPTNeoXConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from teachvllm import LLM, EngineArgs, LLMEngine, SamplingParams
from teachvllm.arg_utils import read_stored_pooling
from teachvllm.config import NotSupportedYet, PoolerConfig, UnknownArgument
from teachvllm.inputs import gguf_tokenizer
from teachvllm.messages import EngineCoreRequest
from teachvllm.outputs import ScoringRequestOutput
from teachvllm.sampling_params import BeamSearchParams, PoolingParams
from teachvllm.transformers_utils import bundled_model

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": TINY["llama"],
    "llama-tied": TINY["llama-tied-biased"],
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=8),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16),
    "opt-350m-like": TINY["opt-350m-like"],
    "gpt2": lambda: GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=256),
    "gpt_neox": lambda: GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
    ),
}
# the last two share a prefix
PROMPTS = random_prompts(9, 60) + [[7], [7, 9], list(range(3, 43)), list(range(3, 60))]


def make(name: str, folder: Path, auto: Any, **changes: Any) -> Any:
    "Write the model `name`, with the head of `auto`, into `folder`; returns transformers' model."
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.pad_token_id = 0
    for key, value in changes.items():
        setattr(config, key, value)
    model = auto.from_config(config).eval().float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    "Llamas with each kind of head, and transformers' models."
    heads = {
        "causal": AutoModelForCausalLM,
        "body": AutoModel,
        "labels": AutoModelForSequenceClassification,
    }
    made: dict[str, tuple[Path, Any]] = {}
    for name, auto in heads.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = (
            folder,
            make("llama", folder, auto, **({"num_labels": 3} if name == "labels" else {})),
        )
    return made


def engine(folder: Path, **options: Any) -> LLM:
    small = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 64, "block_size": 4}
    return LLM(str(folder), skip_tokenizer_init=True, **small | options)


@torch.inference_mode()
def hidden_states(model: Any, ids: list[int]) -> torch.Tensor:
    "After the last norm: [len(ids), hidden_size]."
    body = model.base_model
    return body(torch.tensor([ids])).last_hidden_state[0]


POOL = {"LAST": lambda x: x[-1], "MEAN": lambda x: x.mean(0), "CLS": lambda x: x[0]}


def expected(model: Any, kind: str = "LAST", normalize: bool = True) -> list[torch.Tensor]:
    vectors = [POOL[kind](hidden_states(model, ids)) for ids in PROMPTS]
    return [x / x.norm() for x in vectors] if normalize else vectors


def close(outputs: list[Any], wanted: list[torch.Tensor]) -> None:
    found = [
        torch.tensor(getattr(x.outputs, "embedding", None) or x.outputs.probs) for x in outputs
    ]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family(name: str, tmp_path: Path) -> None:
    """As a causal model, and without a head: the same vectors, though the second's names lack the
    prefix.
    """
    for auto in (
        (AutoModelForCausalLM, AutoModel)
        if name in ("llama", "gpt2", "opt-350m-like")
        else (AutoModelForCausalLM,)
    ):
        wanted = expected(make(name, tmp_path, auto))
        with engine(
            tmp_path, task="auto" if auto is AutoModel else "embed", max_num_batched_tokens=16
        ) as llm:
            close(llm.embed(PROMPTS, use_tqdm=False), wanted)


@pytest.mark.parametrize("name", ["llama", "qwen2", "opt-350m-like", "gpt2"])
def test_labels(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path, AutoModelForSequenceClassification, num_labels=3)
    logits = [model(torch.tensor([ids])).logits[0].detach() for ids in PROMPTS]
    with engine(tmp_path, max_num_batched_tokens=16) as llm:
        outputs = llm.classify(PROMPTS, use_tqdm=False)
        close(outputs, [x.softmax(-1) for x in logits])
        assert all(output.outputs.num_classes == 3 for output in outputs)
    with engine(tmp_path, task="reward") as llm:
        for output, wanted in zip(llm.encode(PROMPTS, use_tqdm=False), logits, strict=True):
            torch.testing.assert_close(output.outputs.data, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 4, 16, 512])
@pytest.mark.parametrize("kind", POOL)
def test_chunks(folders: dict, kind: str, chunk: int) -> None:
    """Each kind, alone and in a batch, twice: the second time with what the prefix cache may have
    kept.
    """
    folder, model = folders["causal"]
    wanted = expected(model, kind, normalize=False)
    config = PoolerConfig(pooling_type=kind, normalize=False)
    for caching in (True, False) if chunk == 4 else (True,):
        with engine(
            folder,
            task="embed",
            override_pooler_config=config,
            enable_prefix_caching=caching,
            max_num_batched_tokens=chunk,
            max_num_seqs=5,
        ) as llm:
            for _ in range(2):
                close(llm.embed(PROMPTS, use_tqdm=False), wanted)
            hits = llm.get_metrics()["prefix_cache_hits"]
            assert (hits > 0) == (caching and kind == "LAST")


@pytest.mark.parametrize("kind", POOL)
@pytest.mark.parametrize("ahead", [False, True])
def test_preempted_requests_begin_again(folders: dict, kind: str, ahead: bool) -> None:
    "By requests of a higher priority, in the middle of their prompts; slots are used again."
    folder, model = folders["causal"]
    options = {
        "scheduling_policy": "priority",
        "num_gpu_blocks_override": 18,
        "swap_space": 1,
        "async_scheduling": ahead,
    }
    config = {"pooling_type": kind, "normalize": False}
    llm = engine(
        folder, task="embed", override_pooler_config=config, max_num_batched_tokens=8, **options
    )
    order = llm.llm_engine
    found = {}
    todo = list(enumerate(PROMPTS))
    while todo or order.has_unfinished_requests():
        for i, prompt in todo[:1]:
            order.add_request(str(i), prompt, PoolingParams(), priority=-i)
        todo = todo[1:]
        found |= {int(output.request_id): output.outputs.data for output in order.step()}
    assert llm.get_metrics()["num_preemptions"] > 0 == llm.get_metrics()["num_swapped_out_blocks"]
    for i, wanted in enumerate(expected(model, kind, normalize=False)):
        torch.testing.assert_close(found[i], wanted, atol=1e-4, rtol=1e-4)
    assert llm.get_metrics()["num_gpu_blocks_used"] == 0
    llm.close()


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_two_workers(folders: dict, ranks: dict) -> None:
    """Ranks that share the layers, with a sum over chunks; stages, of which only the last has the
    head for labels.
    """
    if "pipeline_parallel_size" in ranks:
        folder, model = folders["labels"]
        labels = [model(torch.tensor([ids])).logits[0].detach().softmax(-1) for ids in PROMPTS]
        with engine(folder, max_num_batched_tokens=16, **ranks) as llm:
            close(llm.classify(PROMPTS, use_tqdm=False), labels)
    else:
        folder, model = folders["causal"]
        config = {"pooling_type": "MEAN"}
        with engine(
            folder, task="embed", override_pooler_config=config, max_num_batched_tokens=16, **ranks
        ) as llm:
            close(llm.embed(PROMPTS, use_tqdm=False), expected(model, "MEAN"))


def test_scores_of_embeddings(folders: dict) -> None:
    folder, model = folders["body"]
    vectors = expected(model)
    with engine(folder, task="score") as llm:
        pairs = llm.score(PROMPTS[:3], PROMPTS[3:6], use_tqdm=False)
        several = llm.score([PROMPTS[0]], PROMPTS[3:6], use_tqdm=False)
        cut = llm.score([PROMPTS[0]], [PROMPTS[0][-3:]], truncate_prompt_tokens=3, use_tqdm=False)[
            0
        ]
        assert all(isinstance(x, ScoringRequestOutput) and x.finished for x in pairs)
        for i in range(3):
            assert pairs[i].outputs.score == pytest.approx(
                float(vectors[i] @ vectors[3 + i]), abs=1e-4
            )
            assert several[i].outputs.score == pytest.approx(
                float(vectors[0] @ vectors[3 + i]), abs=1e-4
            )
        assert cut.outputs.score == pytest.approx(1, abs=1e-5) and len(cut.prompt_token_ids) == 6
        with pytest.raises(ValueError, match="text_1 has 2 texts, text_2 3"):
            llm.score(PROMPTS[:2], PROMPTS[:3])


def test_scores_of_pairs(tmp_path: Path) -> None:
    "A model with one label reads both texts, joined by the tokenizer."
    tokenizer = gguf_tokenizer(bundled_model())
    model = make(
        "llama",
        tmp_path,
        AutoModelForSequenceClassification,
        num_labels=1,
        vocab_size=len(tokenizer),
    )
    tokenizer.save_pretrained(tmp_path)
    texts = ["The capital of France is Paris.", "A cat sat on the mat."]
    with LLM(str(tmp_path), dtype="float32", device="cpu", num_gpu_blocks_override=64) as llm:
        found = [
            x.outputs.score
            for x in llm.score("What is the capital of France?", texts, use_tqdm=False)
        ]
        with pytest.raises(ValueError, match="give texts"):
            llm.score([1, 2], [3, 4])
        assert llm.classify(texts, use_tqdm=False)[0].outputs.num_classes == 1
    for score, text in zip(found, texts, strict=True):
        ids = tokenizer("What is the capital of France?", text, return_tensors="pt").input_ids
        assert score == pytest.approx(float(model(ids).logits.detach().sigmoid()), abs=1e-4)


def test_what_sentence_transformers_wrote(tmp_path: Path) -> None:
    "A folder that says how it pools is for embeddings; what the user says counts more."
    model = make("llama", tmp_path, AutoModelForCausalLM)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_mean_tokens": True})
    )
    assert read_stored_pooling(tmp_path) == {"pooling_type": "MEAN", "normalize": False}
    with engine(tmp_path) as llm:
        close(llm.embed(PROMPTS, use_tqdm=False), expected(model, "MEAN", normalize=False))
    (tmp_path / "modules.json").write_text(
        json.dumps([{"type": "sentence_transformers.models.Normalize"}])
    )
    with engine(tmp_path, override_pooler_config={"pooling_type": "CLS"}) as llm:
        close(llm.embed(PROMPTS, use_tqdm=False), expected(model, "CLS"))
    with engine(tmp_path, task="generate") as llm:
        assert llm.generate(PROMPTS[:1], use_tqdm=False)[0].finished


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("kind", POOL)
def test_a_prompt_may_fill_the_model(folders: dict, kind: str, chunk: int) -> None:
    "A vector needs no room for a token of output; an answer does."
    folder, model = folders["causal"]
    longest = list(range(3, 43))
    longer = list(range(3, 44))
    config = PoolerConfig(pooling_type=kind, normalize=False)
    options: dict[str, Any] = {
        "max_model_len": 40,
        "max_num_batched_tokens": chunk,
        "num_gpu_blocks_override": 25,
    }
    with engine(folder, task="embed", override_pooler_config=config, **options) as llm:
        outputs = llm.embed([longest, longest[:-1], longest], use_tqdm=False)
        close(
            outputs,
            [POOL[kind](hidden_states(model, ids)) for ids in (longest, longest[:-1], longest)],
        )
        with pytest.raises(
            ValueError, match="41 tokens, so it is longer than the maximum model length of 40"
        ):
            llm.embed(longer, use_tqdm=False)
        cut = llm.score([longer], [[7, *longer]], truncate_prompt_tokens=40, use_tqdm=False)[0]
        assert cut.outputs.score == pytest.approx(1, abs=1e-4) and len(cut.prompt_token_ids) == 80
        with pytest.raises(ValueError, match="maximum model length of 40"):
            llm.score([longer], [longer], truncate_prompt_tokens=41, use_tqdm=False)


def test_a_prompt_of_text_leaves_room_for_a_token(folders: dict) -> None:
    with engine(folders["causal"][0], max_model_len=40) as llm:
        assert len(llm.generate(list(range(3, 42)), use_tqdm=False)[0].outputs[0].token_ids) == 1
        for keep in (None, 40):
            with pytest.raises(
                ValueError,
                match="so with one token of output it is longer than the maximum model length",
            ):
                llm.generate(
                    list(range(3, 43)), SamplingParams(truncate_prompt_tokens=keep), use_tqdm=False
                )
        cut = SamplingParams(truncate_prompt_tokens=39, max_tokens=4)
        assert (
            len(llm.generate(list(range(3, 43)), cut, use_tqdm=False)[0].outputs[0].token_ids) == 1
        )


def test_the_wrong_kind_of_request(folders: dict) -> None:
    with engine(folders["causal"][0]) as llm:
        for call in (llm.encode, llm.embed, llm.classify, lambda x: llm.score(x, x)):
            with pytest.raises(
                ValueError,
                match='task="generate": this engine generates text; task="embed" gives vectors',
            ):
                call(PROMPTS[:1])
        assert llm.generate(PROMPTS[:1], use_tqdm=False)[0].finished
    with engine(folders["causal"][0], task="embed") as llm:
        for params in (SamplingParams(), BeamSearchParams(2, 2)):
            with pytest.raises(ValueError, match='task="embed": this engine gives vectors'):
                llm.llm_engine.add_request("a", [1], params)
        with pytest.raises(ValueError, match='task="embed"'):
            llm.generate(PROMPTS[:1])
        with pytest.raises(ValueError, match="LLM.classify"):
            llm.classify(PROMPTS[:1])
        with pytest.raises(ValueError, match="2 pooling_params for 1 prompts"):
            llm.encode(PROMPTS[:1], [PoolingParams()] * 2)
        with pytest.raises(NotSupportedYet, match="lora_request"):
            llm.embed(PROMPTS[:1], lora_request="mine")
        with pytest.raises(NotSupportedYet, match="dimensions"):
            PoolingParams(dimensions=8)
        assert len(llm.embed(prompts := PROMPTS[:2], use_tqdm=False)) == len(prompts)
        assert not llm.llm_engine.has_unfinished_requests()
    with engine(folders["labels"][0]) as llm:
        for call in (llm.embed, lambda x: llm.score(x, x)):
            with pytest.raises(ValueError, match="LLM"):
                call(PROMPTS[:1])


def test_arguments(folders: dict) -> None:
    causal = str(folders["causal"][0])
    labels = str(folders["labels"][0])

    def pooler(model: str, **options: Any) -> PoolerConfig | None:
        return (
            EngineArgs(model, device="cpu", **options)
            .create_engine_config()
            .model_config.pooler_config
        )

    assert pooler(causal) is None is pooler(causal, runner="generate", task="generate")
    assert (
        pooler(causal, runner="pooling")
        == pooler(causal, convert="embed")
        == pooler(causal, task="embed")
    )
    assert pooler(labels) == PoolerConfig("LAST", False, True, "classify", True)
    assert pooler(labels, task="embed") == PoolerConfig("LAST", True, False, "embed", False)
    wrong: list[tuple[str, dict, str]] = [
        (
            causal,
            {"task": "classify"},
            "task='classify' needs a model with a head for labels, LlamaForCausalLM has none",
        ),
        (causal, {"task": "reward"}, "task='reward' needs"),
        (causal, {"task": "draw"}, "task='draw': choose auto, generate, embed"),
        (causal, {"task": "generate", "convert": "embed"}, "contradict"),
        (causal, {"runner": "generate", "task": "embed"}, "contradict"),
        (causal, {"override_pooler_config": {"normalize": False}}, 'set task="embed"'),
        (
            causal,
            {"task": "embed", "override_pooler_config": "MEAN"},
            "override_pooler_config='MEAN' must be",
        ),
        (
            causal,
            {"task": "embed", "preemption_mode": "swap"},
            'preemption_mode="swap" cannot go with task="embed"',
        ),
        (
            causal,
            {"task": "embed", "override_pooler_config": {"pooling_type": "MAX"}},
            "choose LAST, MEAN or CLS",
        ),
        (
            causal,
            {"task": "embed", "override_pooler_config": {"pooling_type": "ALL"}},
            "not in teachvllm yet",
        ),
        (
            labels,
            {"task": "generate"},
            "architecture LlamaForSequenceClassification is not supported",
        ),
    ]
    for model, options, said in wrong:
        with pytest.raises(ValueError, match=said):
            engine(Path(model), **options)
    with pytest.raises(UnknownArgument, match="pooling_type"):
        PoolerConfig(poling_type="MEAN")  # type: ignore[call-arg]


def test_nan_is_an_error(folders: dict) -> None:
    def poison(model: Any) -> None:
        next(model.parameters())[7] = torch.nan

    with engine(folders["causal"][0], task="embed", enable_prefix_caching=False) as llm:
        llm.apply_model(poison)
        with pytest.raises(RuntimeError, match=r"prompt 1: .*\(NaN\)"):
            llm.embed([[9], [7]], use_tqdm=False)
        assert (
            len(llm.embed([[9], [3]], use_tqdm=False)) == 2
            and not llm.llm_engine.has_unfinished_requests()
        )


def test_requests_are_data() -> None:
    nothing = SamplingParams(max_tokens=1)
    request = EngineCoreRequest("0", [5, 6], nothing, 0, pooling_params=PoolingParams())
    assert (
        msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineCoreRequest) == request
    )


def test_a_profile_needs_no_head(folders: dict) -> None:
    "The memory is measured, and the worker warms up, without logits."
    folder, model = folders["causal"]
    args = EngineArgs(
        str(folder),
        task="embed",
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        max_num_seqs=4,
    )
    llm_engine = LLMEngine.from_engine_args(args)
    names = llm_engine.collective_rpc(
        lambda worker: [name for name, _ in worker.model_runner.model.named_parameters()]
    )[0]
    assert not [name for name in names if "lm_head" in name]
    llm_engine.close()
