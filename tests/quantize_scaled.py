"""What `teachvllm quantize` writes with eight bits on both sides, served by the engine and computed
by transformers: with the numbers of the folder, and each layer's inputs rounded token by token.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import greedy, make_tiny
from safetensors.torch import load_file
from test_quantization import PROMPTS, texts

from teachvllm.__main__ import main
from teachvllm.quantization.gptq import linear_layers


def round_inputs(scheme: str, layer: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    "As the engine does: each token has a scale."
    x = args[0].float()
    largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-9)
    if scheme == "w8a8":
        scale = largest / 127
        return ((x / scale).round().clamp(-128, 127) * scale,)
    scale = largest / 448
    return ((x / scale).to(torch.float8_e4m3fn).float() * scale,)


@pytest.mark.parametrize("name", ["llama", "llama-tied-biased"])
@pytest.mark.parametrize(
    ("scheme", "options"), [("w8a8", []), ("fp8", []), ("fp8", ["--strategy", "tensor"])]
)
def test_eight_bits_on_both_sides(
    tmp_path: Path, name: str, scheme: str, options: list[str]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    hf_model = make_tiny(name, source)
    argv = ["quantize", str(source), "--scheme", scheme, "--out", str(out), *options]
    assert main(argv) == 0
    plain = [greedy(hf_model, prompt, 8) for prompt in PROMPTS]
    tensors = load_file(out / "model.safetensors")
    for path, layer in linear_layers(hf_model).items():
        layer.weight.data = tensors[f"{path}.weight"].float() * tensors[f"{path}.weight_scale"]
        layer.register_forward_pre_hook(partial(round_inputs, scheme))
    rounded = [greedy(hf_model, prompt, 8) for prompt in PROMPTS]
    assert texts(out, PROMPTS) == rounded
    assert sum(a[0] == b[0] for a, b in zip(plain, rounded)) >= 1  # it is still near
