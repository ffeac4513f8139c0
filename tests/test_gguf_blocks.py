"""GGUF files served from their own blocks, which are made here by the package `gguf`, or of random
bytes; what they stand for is said by that package, and computed by transformers.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import greedy, runner_of
from test_models import write_gguf
from test_parallel import Ranked
from test_worker import make_config
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from teachvllm import LLM, kernels
from teachvllm.distributed.parallel_state import ParallelState, run_ranks
from teachvllm.model_executor.layers import LinearBase, WeightsError, attention_layers
from teachvllm.model_executor.loader import get_model, make_context
from teachvllm.model_executor.models.parity import random_sequences
from teachvllm.quantization.gguf import SideBySide
from teachvllm.quantization.grouped import GroupedWeight
from teachvllm.sampling_params import SamplingParams

gguf = pytest.importorskip("gguf")
blocks = pytest.importorskip("teachvllm.quantization.gguf")

VOCAB = 260  # the tokens that `write_gguf` names
SHAPE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 4,
    "num_gpu_blocks_override": 64,
}
PROMPTS = random_sequences(VOCAB, (5, 11))
# where a block of a K-quant has its scales, and how large they are, so that weights are near 0.1
SCALES = {
    "Q2_K": {80: 0.015, 82: 0.015},
    "Q4_K": {0: 0.0007, 2: 0.005},
    "Q5_K": {0: 0.00035, 2: 0.005},
    "Q6_K": {208: 0.0001},
}


def mixed(name: str) -> str:
    "As a Q4_K_M file: more bits for values and for what comes back."
    if name.endswith("up_proj"):
        return "Q5_K"
    return "Q6_K" if name.endswith(("v_proj", "down_proj", "embed_tokens")) else "Q4_K"


def not_all_served(name: str) -> str:
    "Of one stacked layer a part that is in none of the eight formats."
    return "Q2_K" if name.endswith("k_proj") else "Q4_0"


KINDS: dict[str, Callable[[str], str]] = {
    **{kind: lambda _, kind=kind: kind for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")},
    "mixed": mixed,
    "not all served": not_all_served,
}


def to_blocks(array: np.ndarray, kind: str, rng: np.random.Generator) -> np.ndarray:
    qtype = gguf.GGMLQuantizationType[kind]
    if kind not in SCALES:
        return np.asarray(gguf.quants.quantize(array, qtype))
    columns, num_bytes = gguf.GGML_QUANT_SIZES[qtype]
    shape = (len(array), array.shape[1] // columns, num_bytes)
    data = rng.integers(0, 256, shape, np.uint8)
    for place, scale in SCALES[kind].items():
        data[..., place : place + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return data.reshape(len(array), -1)


def write(path: Path, kind_of: Callable[[str], str], tied: bool) -> Any:
    "A file, and transformers' model with what its blocks stand for."
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    config = LlamaConfig(vocab_size=VOCAB, tie_word_embeddings=tied, **SHAPE, **HEADS)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)

    def store(base: str, array: np.ndarray) -> tuple[np.ndarray, Any]:
        if array.ndim < 2:
            return array, None
        kind = kind_of(base)
        data = to_blocks(array, kind, rng)
        right = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
        if base.endswith(("q_proj", "k_proj")):  # back into transformers' order
            heads = HEADS["num_attention_heads" if "q_proj" in base else "num_key_value_heads"]
            right = right.reshape(heads, -1, 2, 256).swapaxes(1, 2).reshape(right.shape)
        model.get_submodule(base).weight.data = torch.from_numpy(right.copy())
        if tied and base.endswith("embed_tokens"):
            model.lm_head.weight = model.model.embed_tokens.weight
        return data, gguf.GGMLQuantizationType[kind]

    write_gguf(path, "llama", model, store)
    return model


def scores(path: Path) -> list[torch.Tensor]:
    "Log-probabilities of all tokens behind each of the prompts' tokens but the last."
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    with LLM(str(path), max_logprobs=-1, **OPTIONS) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    rows = [output.prompt_logprobs[1:] for output in outputs]
    return [torch.tensor([[x[i].logprob for i in range(VOCAB)] for x in row]) for row in rows]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_what_the_blocks_stand_for(
    tmp_path: Path, kind: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHVLLM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    hf_model = write(path, KINDS[kind], tied)
    for found, prompt in zip(scores(path), PROMPTS, strict=True):
        with torch.inference_mode():
            right = hf_model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        torch.testing.assert_close(found, right, atol=1e-3, rtol=1e-4)
    assert not (tmp_path / "cache").exists()  # nothing was unpacked to a folder


def test_matrices_of_two_formats_stay_as_small_as_they_are(tmp_path: Path) -> None:
    "Each in its own form, and a decode step is recorded all the same."
    pytest.importorskip("numba")
    path = tmp_path / "model.gguf"
    hf_model = write(path, KINDS["mixed"], True)
    with LLM(str(path), **OPTIONS) as llm:
        layer = runner_of(llm).model.model.layers[0].self_attn.qkv_proj
        found = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        assert runner_of(llm).graphs is not None
    four, six = layer.packed.parts
    assert (four.form.bits, six.form.bits) == (4, 8) and six.form.block == 16
    assert not six.form.minimum
    # 4 bits, and 2 numbers of 32 bits for 32 columns; 8 bits, and one for 16, and a zero point
    q_and_k, v = layer.packed.sizes
    assert layer.packed.nbytes == 256 * (q_and_k * 6 + v * 10) // 8 + six.seconds.nbytes
    texts = [list(output.outputs[0].token_ids) for output in found]
    assert texts == [greedy(hf_model, prompt, 8) for prompt in PROMPTS]


def test_products_side_by_side_go_where_the_model_goes() -> None:
    "As when an engine sleeps: what is in a plain list would stay on the GPU."
    parts = [
        GroupedWeight(torch.ones(64, 32, dtype=torch.uint8), torch.ones(64, 1), 8, 4)
        for _ in range(2)
    ]
    both = SideBySide(parts, [64, 64])
    x = torch.randn(3, 32)
    assert torch.equal(both(x), torch.cat([part(x) for part in parts], 1))
    assert {buffer.device.type for buffer in both.to("meta").buffers()} == {"meta"}


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["Q4_1", "mixed"])
def test_two_ranks(tmp_path: Path, kind: str) -> None:
    "Each has its part of numbers, scales and minima, also of a tied head."
    path = tmp_path / "model.gguf"
    hf_model = write(path, KINDS[kind], True)
    config = make_config(str(path), quantization="gguf")

    def tokens(parallel: ParallelState) -> list[int]:
        ranked = Ranked(hf_model, parallel)  # for its pages; the weights are those of the file
        model = get_model(config, make_context(config, parallel))
        assert all(m.packed is not None for m in model.modules() if isinstance(m, LinearBase))
        ranked.model = model
        ranked.layers = list(attention_layers(model).values())
        return ranked.greedy(PROMPTS[0], 8)

    assert run_ranks(tokens, 2) == [greedy(hf_model, PROMPTS[0], 8)] * 2


def test_a_tied_embedding_is_kept_once(tmp_path: Path) -> None:
    "Where the CPU's product serves; `apply_model` sees it whole, and may change it."
    pytest.importorskip("numba")
    path = tmp_path / "model.gguf"
    write(path, KINDS["Q8_0"], True)
    with LLM(str(path), **OPTIONS) as llm:
        (head,) = llm.apply_model(lambda model: type(model.lm_head.packed).__name__)
        runner = runner_of(llm)
        numbers = runner.model.model.embed_tokens.weight.numel()
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        before = llm.generate(PROMPTS, params, use_tqdm=False)
        shapes = llm.apply_model(lambda model: tuple(model.model.embed_tokens.weight.shape))
        again = llm.generate(PROMPTS, params, use_tqdm=False)
        llm.apply_model(lambda model: model.model.embed_tokens.weight.data.mul_(-1))
        after = llm.generate(PROMPTS, params, use_tqdm=False)
    ids = [[list(o.outputs[0].token_ids) for o in outputs] for outputs in (before, again, after)]
    assert ids[0] == ids[1] != ids[2]
    assert shapes == [(VOCAB, 256)] and head == "PackedGroups"
    assert numbers == 0 and runner.model.model.embed_tokens.weight.numel()  # changed: it stays


PEAK = """
import gc, re, sys
from pathlib import Path
from teachvllm.arg_utils import EngineArgs
from teachvllm.model_executor.loader import compile_kernels, get_model, make_context
from teachvllm.transformers_utils import bundled_model

def memory(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

config = EngineArgs(dtype="float32", device="cpu").create_engine_config()
context = compile_kernels(config, make_context(config))
gc.collect()
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
model = get_model(config, context)
print((memory("VmHWM") - before) / bundled_model().stat().st_size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_is_never_there_twice() -> None:
    "What is read is packed, and let go, before the next layer is: pages of the file included."
    utils = pytest.importorskip("teachvllm.cpu_kernels.utils")
    if not utils.host_features().get("fma"):
        pytest.skip("this processor has no product of blocks: they are unpacked")
    command = [sys.executable, "-c", PEAK]
    subprocess.run(command, check=True, capture_output=True)  # it may have to compile
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert 0.9 < float(done.stdout) < 1.5  # 1.3; one copy of all and its pages would be 2


def test_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    hf_model = write(path, KINDS["Q4_0"], True)
    hf_model.save_pretrained(tmp_path / "folder")
    with pytest.raises(ValueError, match="quantization='gguf': .* no quantization_config"):
        LLM(str(tmp_path / "folder"), quantization="gguf", **OPTIONS)
    with pytest.raises(ValueError, match=r"model config \(gguf\) does not match .*\(awq\)"):
        LLM(str(path), **OPTIONS | {"quantization": "awq"})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 3 // 4])
    with pytest.raises(WeightsError, match=r"corrupt or cut short: blk\.\d"):
        LLM(str(path), **OPTIONS)


def test_matrices_that_lie_otherwise_are_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_inner": 64}
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, **sizes)).eval()
    write_gguf(path, "gpt2", gpt2)
    for found, prompt in zip(scores(path), PROMPTS, strict=True):
        with torch.inference_mode():
            right = gpt2(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        torch.testing.assert_close(found, right, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_without_a_product_weights_are_plain(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    "Computed by torch, they give the same scores; `apply_model` may change them."
    path = tmp_path / "model.gguf"
    hf_model = write(path, KINDS["mixed"], tied)
    monkeypatch.setitem(kernels.KERNELS, "cpu", {})
    with LLM(str(path), **OPTIONS) as llm:
        (kinds,) = llm.apply_model(
            lambda model: {
                type(m.linear_method).__name__ for m in model.modules() if isinstance(m, LinearBase)
            }
        )
    assert kinds == {"UnquantizedLinearMethod"}
    for found, prompt in zip(scores(path), PROMPTS, strict=True):
        with torch.inference_mode():
            right = hf_model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        torch.testing.assert_close(found, right, atol=1e-3, rtol=1e-4)
