"""`teachvllm quantize`: what it writes, judged by packers of others, by transformers with the same
numbers unpacked, and by the layers whose inputs were looked at.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import VOCAB, greedy, make_tiny
from safetensors.torch import load_file, save_file
from test_quantization import PROMPTS, change_config, make_mixtral, texts, words
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from teachvllm.__main__ import main
from teachvllm.quantization import gptq, quantize
from teachvllm.quantization.gptq import FOLDS, Grid, LayerInputs
from teachvllm.quantization.quantize import SCHEMES, quantize_folder

FOUR_BITS = [name for name, recipe in SCHEMES.items() if recipe.num_bits == 4]


def add_tokenizer(folder: Path) -> None:
    "Words are the numbers of tokens."
    vocab = {str(i): i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def calibration(folder: Path, count: int = 600) -> str:
    "A file with so many words."
    ids = torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    path = folder / "calibration.text"
    path.write_text(" ".join(map(str, ids)))
    return str(path)


def unpacked(tensors: dict[str, torch.Tensor], path: str) -> torch.Tensor:
    "A matrix from what `pack-quantized` stores: eight numbers to an int32, 8 too large."
    packed = tensors[f"{path}.weight_packed"].numpy().view(np.uint32)
    scales = tensors[f"{path}.weight_scale"].float()
    n, k = tensors[f"{path}.weight_shape"].tolist()
    weight = torch.zeros(n, k)
    for column in range(k):
        nibbles = packed[:, column // 8] >> np.uint32(4 * (column % 8)) & np.uint32(15)
        numbers = torch.from_numpy(nibbles.astype(np.float32)) - 8
        weight[:, column] = numbers * scales[:, column * scales.shape[1] // k]
    return weight


def plain_model(folder: Path, into: Path) -> Any:
    "transformers' model with the numbers of a quantized folder, unpacked here."
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    for name in list(tensors):
        path, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            tensors[f"{path}.weight"] = unpacked(tensors, path)
            for stored in ("weight_packed", "weight_scale", "weight_shape"):
                del tensors[f"{path}.{stored}"]
    into.mkdir()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (into / "config.json").write_text(json.dumps(config))
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(into, dtype=torch.float32).eval()


# The folder


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", []),
        ("llama", ["--strategy", "channel"]),
        ("llama-tied-biased", ["--group-size", "16"]),
        ("opt", ["--group-size", "8"]),
        ("mixtral", []),
        *[("llama", ["--scheme", scheme]) for scheme in ("gptq", "awq")],
        ("llama", ["--scheme", "gptq", "--strategy", "channel"]),
        ("llama-tied-biased", ["--scheme", "awq", "--group-size", "16"]),
        ("opt", ["--scheme", "gptq"]),
    ],
)
def test_the_engine_says_what_transformers_says(
    tmp_path: Path, name: str, options: list[str], capsys: pytest.CaptureFixture
) -> None:
    "With the numbers of the folder; and these are near to those of the model that was rounded."
    source = tmp_path / "source"
    source.mkdir()
    hf_model = make_mixtral(source) if name == "mixtral" else make_tiny(name, source)
    add_tokenizer(source)
    if "--scheme" in options:
        options = [*options, "--calibration", calibration(tmp_path)]
    out = tmp_path / "out"
    assert main(["quantize", str(source), "--out", str(out), *options]) == 0
    said = capsys.readouterr().out
    assert str(out) in said and "MB of weights" in said
    rounded = plain_model(out, tmp_path / "plain")
    weights = hf_model.state_dict()
    changed = {
        path: float((w - weights[path]).norm() / weights[path].norm())
        for path, w in rounded.state_dict().items()
        if not torch.equal(w, weights[path])
    }
    experts = {path for path in changed if "experts" in path}
    linear = {f"{path}.weight" for path in gptq.linear_layers(hf_model)} | experts
    assert linear <= set(changed) and bool(experts) == (name == "mixtral")
    if "awq" not in options:  # it scales weights, and norms
        assert linear == set(changed) and all(0.01 < off < 0.25 for off in changed.values())
    assert texts(out, PROMPTS) == [greedy(rounded, prompt, 8) for prompt in PROMPTS]


def test_several_files_and_what_is_copied(tmp_path: Path) -> None:
    source, whole, parts = (tmp_path / name for name in ("source", "whole", "parts"))
    make_tiny("llama", source)
    quantize_folder(str(source), whole)
    make_tiny("llama", source, max_shard_size="60kB")
    (source / "model.safetensors").unlink()
    for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja", "notes.md"):
        (source / name).write_text("{}")
    assert len(list(source.glob("*.safetensors"))) > 3
    quantize_folder(str(source), parts)
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    found = {}
    for file in parts.glob("*.safetensors"):
        tensors = load_file(file)
        assert all(index["weight_map"][name] == file.name for name in tensors)
        found |= tensors
    expected = load_file(whole / "model.safetensors")
    assert found.keys() == expected.keys() == index["weight_map"].keys()
    assert all(found[name].equal(expected[name]) for name in found)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    copied = {path.name for path in parts.iterdir() if path.suffix != ".safetensors"}
    assert copied == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
    }
    assert texts(parts, PROMPTS) == texts(whole, PROMPTS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_of_the_checkpoint_stay(tmp_path: Path, dtype: torch.dtype) -> None:
    "Of what is not rounded, also where AWQ has changed it; and scales have the weights' type."
    source = tmp_path / "source"
    model = make_tiny("llama", source).to(dtype)
    model.save_pretrained(source)
    add_tokenizer(source)
    out = quantize_folder(str(source), tmp_path / "out", "awq", calibration=calibration(tmp_path))
    before = load_file(source / "model.safetensors")
    after = load_file(out / "model.safetensors")
    assert {after[name].dtype for name in before if name in after} == {dtype}
    assert {t.dtype for name, t in after.items() if name.endswith("weight_scale")} == {dtype}
    norms = [name for name in before if name.endswith("layernorm.weight")]
    assert norms and not all(before[name].equal(after[name]) for name in norms)
    name = "model.embed_tokens.weight"
    assert before[name].equal(after[name])


def test_a_router_is_ignored_by_its_name(tmp_path: Path) -> None:
    make_mixtral(tmp_path / "source")
    out = quantize_folder(str(tmp_path / "source"), tmp_path / "out")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    routers = [f"model.layers.{i}.block_sparse_moe.gate" for i in range(2)]
    assert config["ignore"] == ["lm_head", *routers]
    tensors = load_file(out / "model.safetensors")
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight_packed" in tensors
    assert all(f"{router}.weight" in tensors for router in routers)


# Bytes


def test_the_packer_is_that_of_the_readers_tests() -> None:
    numbers = np.random.default_rng(0).integers(-8, 8, (5, 24))
    packed = quantize.pack_int32(torch.from_numpy(numbers).to(torch.int8), 4)
    assert packed.numpy().tolist() == words(numbers + 8, 4).tolist()
    eight = np.random.default_rng(0).integers(-128, 128, (5, 24))
    packed = quantize.pack_int32(torch.from_numpy(eight).to(torch.int8), 8)
    assert packed.numpy().tolist() == words(eight + 128, 8).tolist()


def test_the_packer_of_compressed_tensors() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    numbers = torch.randint(-8, 8, (16, 40), dtype=torch.int8)
    assert helpers.pack_to_int32(numbers, 4).equal(quantize.pack_int32(numbers, 4))


@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_compressed_tensors_reads_the_config(scheme: str) -> None:
    "Its own classes take every key, and mean by it what was meant."
    library = pytest.importorskip("compressed_tensors.quantization")
    strategy, group_size = SCHEMES[scheme].strategies[0], None
    if strategy == "group":
        group_size = 32
    written = quantize.quantization_config(scheme, strategy, group_size, ["lm_head"])
    group = written["config_groups"]["group_0"]
    fields = set(library.QuantizationArgs.model_fields)
    assert set(group["weights"]) <= fields | {"actorder"}
    read = library.QuantizationConfig.model_validate(written)
    weights = read.config_groups["group_0"].weights
    assert (weights.num_bits, weights.strategy, weights.group_size) == (
        SCHEMES[scheme].num_bits,
        strategy,
        group_size,
    )
    inputs = read.config_groups["group_0"].input_activations
    assert (inputs is None) == (SCHEMES[scheme].num_bits == 4)
    assert inputs is None or (inputs.dynamic and inputs.strategy == "token")
    assert read.format == SCHEMES[scheme].format and read.ignore == ["lm_head"]


def test_bytes_of_eight_bits() -> None:
    "Within half a step of each weight; the largest of a row has the largest number."
    torch.manual_seed(0)
    weight = torch.randn(6, 40) * torch.logspace(-3, 3, 6)[:, None]
    weight[0] = 0
    stored = quantize.int8_tensors(weight)
    assert stored["weight"].dtype == torch.int8 and stored["weight_scale"].shape == (6, 1)
    assert stored["weight_scale"].dtype == torch.float32
    off = (stored["weight"].float() * stored["weight_scale"] - weight).abs()
    assert (off <= 0.501 * stored["weight_scale"]).all()
    assert (stored["weight"][1:].short().abs().amax(1) >= 127).all()
    for strategy, shape in (("channel", (6, 1)), ("tensor", (1,))):
        stored = quantize.fp8_tensors(weight.half() if strategy == "tensor" else weight, strategy)
        assert stored["weight"].dtype == torch.float8_e4m3fn
        assert (stored["weight_scale"].shape, stored["weight_scale"].dtype) == (
            shape,
            torch.float32,
        )
        assert stored["weight"].float().abs().max() == 448
        rows = slice(1, None) if strategy == "channel" else slice(5, None)
        off = (stored["weight"].float() * stored["weight_scale"] - weight)[rows].abs()
        smallest = 2.0**-10 * stored["weight_scale"]  # half the smallest step
        smallest = smallest[rows] if strategy == "channel" else smallest
        assert (off <= weight[rows].abs() * 0.0626 + smallest).all()


# GPTQ


def correlated(k: int, tokens: int = 400) -> torch.Tensor:
    "Inputs [tokens, k] of which a few directions have most."
    torch.manual_seed(0)
    mixed = torch.randn(tokens, k // 4) @ torch.randn(k // 4, k)
    return mixed + 0.3 * torch.randn(tokens, k)


@pytest.mark.parametrize("group_size", [8, 32, -1])
@pytest.mark.parametrize("bits", [4, 8])
def test_outputs_are_nearer_than_to_nearest(bits: int, group_size: int) -> None:
    "On the text that it looked at, and on another."
    x = correlated(64, 800)
    inputs, others = LayerInputs(x[:400]), x[400:]
    weight = torch.randn(48, 64)
    grid = Grid(bits, group_size)
    nearest = grid.round(weight).dequantize() - weight
    off = gptq.gptq(weight, inputs, grid).dequantize() - weight
    assert inputs.output_error(off) < 0.7 * inputs.output_error(nearest)
    assert (others @ off.T).norm() < 0.9 * (others @ nearest.T).norm()
    assert off.norm() >= nearest.norm()


@pytest.mark.parametrize("block", [1, 7, 24, 500])
def test_blocks_only_order_sums(block: int) -> None:
    torch.manual_seed(0)
    weight, inputs = torch.randn(9, 24), LayerInputs(correlated(24))
    whole = gptq.gptq(weight, inputs, Grid(4, 8), block=24)
    parts = gptq.gptq(weight, inputs, Grid(4, 8), block=block)
    assert whole.numbers.equal(parts.numbers) and whole.scales.equal(parts.scales)


def test_independent_inputs_leave_it_to_nearest() -> None:
    weight = torch.randn(9, 16)
    inputs = LayerInputs(torch.diag(torch.arange(1.0, 17.0)))
    found = gptq.gptq(weight, inputs, Grid(4, 8))
    assert found.numbers.equal(Grid(4, 8).round(weight).numbers)


def test_inputs_that_are_never_there() -> None:
    "Columns of zeros, and no input at all: nothing to divide by, and no NaN."
    weight, x = torch.randn(9, 16), correlated(16)
    x[:, 3:7] = 0
    for inputs in (LayerInputs(x), LayerInputs(0 * x)):
        found = gptq.gptq(weight, inputs, Grid(4, 8))
        assert found.dequantize().isfinite().all() and found.numbers.abs().max() <= 8


def test_every_layer_is_rounded_for_what_it_gets(tmp_path: Path) -> None:
    "A visit's inputs are those that the layers before it, already changed, have made."
    model = make_tiny("llama", tmp_path)
    ids = torch.randint(VOCAB, (2, 30))
    seen: dict[str, torch.Tensor] = {}

    def halve(name: str, layer: nn.Linear, inputs: LayerInputs) -> None:
        seen[name] = inputs.hessian
        layer.weight.data = layer.weight.data / 2

    gptq.visit_layers(model, ids, halve)
    assert list(seen) == list(gptq.linear_layers(model)) or len(seen) == 21
    again: dict[str, torch.Tensor] = {}
    gptq.visit_layers(model, ids, lambda name, layer, inputs: again.update({name: inputs.hessian}))
    for name, hessian in seen.items():
        torch.testing.assert_close(again[name], hessian)
    assert not any(layer._forward_pre_hooks for layer in gptq.linear_layers(model).values())


# AWQ

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, Callable[..., Any]] = {
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma2": Gemma2Config,
    "gemma3_text": Gemma3TextConfig,
}


@pytest.mark.parametrize("family", list(FOLDS))
def test_folding_changes_no_answer(tmp_path: Path, family: str) -> None:
    "Every family that is served: hidden states stay, and the weights do not."
    if family == "llama":
        model = make_tiny("llama-tied-biased", tmp_path)
    else:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(FAMILIES[family](**SIZES)).eval().float()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.2) if parameter.dim() > 1 or "bias" in name else None
        if name.endswith("norm.weight"):
            nn.init.uniform_(parameter, 0.2, 3.0)
    ids = torch.randint(VOCAB, (2, 40))
    with torch.inference_mode():
        before = model.base_model(ids).last_hidden_state
    old = {name: parameter.clone() for name, parameter in model.named_parameters()}
    changed = gptq.fold_scales(model, ids, Grid(4, 16))
    with torch.inference_mode():
        after = model.base_model(ids).last_hidden_state
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
    moved = {name for name, p in model.named_parameters() if not p.equal(old[name])}
    assert moved <= changed
    linear = {f"{path}.weight" for path in gptq.linear_layers(model)}
    assert len(linear & moved) >= len(linear) - 2 and len(moved - linear) >= 4


def test_the_search_finds_columns_that_matter() -> None:
    "It is never worse than to nearest, and much better where few columns have large inputs."
    torch.manual_seed(0)
    x = torch.randn(500, 64)
    x[:, ::16] *= 30
    inputs, weight, grid = LayerInputs(x), torch.randn(48, 64), Grid(4, 32)
    scale, errors = gptq.search_scale([weight], inputs, grid)
    direct = grid.round(weight * scale).dequantize() / scale - weight
    assert inputs.output_error(direct) == pytest.approx(min(errors), rel=1e-3)
    nearest = inputs.output_error(grid.round(weight).dequantize() - weight)
    assert errors[0] == pytest.approx(nearest, rel=1e-3) and min(errors) < 0.6 * nearest


# What is refused


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    make_tiny("llama", folder)
    add_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--group-size", "40"],
            r"group_size=40 does not divide the (\d+) columns of model.layers.0.\S+weight \[\d+, \1\]",
        ),
        (["--group-size", "0"], "group_size=0 does not divide"),
        (["--strategy", "tensor"], "strategy='tensor': w4a16 has group, channel"),
        (["--scheme", "w8a8", "--group-size", "8"], "group_size=8 is for strategy=group"),
        (["--calibration", "x"], "calibration='x' is for gptq and awq, not for w4a16"),
        (["--scheme", "gptq", "--calibration", "/no"], "calibration='/no' is no file"),
    ],
)
def test_options_that_do_not_fit(
    source: Path, tmp_path: Path, options: list[str], says: str, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(source), "--out", str(out), *options]) == 1
    said = capsys.readouterr().err
    with pytest.raises(ValueError, match=says):
        raise ValueError(said)
    assert "Traceback" not in said and list(tmp_path.iterdir()) == []


def test_unknown_schemes_are_refused(source: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["quantize", str(source), "--scheme", "w2a16"])
    assert "w4a16" in capsys.readouterr().err
    with pytest.raises(ValueError, match="scheme='w2a16': choose one of w4a16, gptq"):
        quantize_folder(str(source), scheme="w2a16")


def test_calibration_of_too_few_words(source: Path, tmp_path: Path) -> None:
    few = calibration(tmp_path, 50)
    with pytest.raises(ValueError, match="calibration has 50 tokens: at least a sequence of 256"):
        quantize_folder(str(source), tmp_path / "out", "gptq", calibration=few)
    quantize_folder(str(source), tmp_path / "out", "gptq", calibration=few, calibration_tokens=40)


def test_models_that_it_is_not_for(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    gpt2 = AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=VOCAB, n_embd=48, n_layer=1, n_head=4, n_positions=64)
    )
    gpt2.save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="model_type='gpt2' has no linear layers"):
        quantize_folder(str(tmp_path / "gpt2"), out)
    make_mixtral(tmp_path / "mixtral")
    with pytest.raises(ValueError, match=r"gptq sees no inputs of experts, \['model.layers.0"):
        quantize_folder(str(tmp_path / "mixtral"), out, "gptq")
    make_tiny("opt", tmp_path / "opt")
    add_tokenizer(tmp_path / "opt")
    text = calibration(tmp_path)
    with pytest.raises(ValueError, match="awq: of model_type='opt'"):
        quantize_folder(str(tmp_path / "opt"), out, "awq", calibration=text)
    quantize_folder(str(source), out)
    with pytest.raises(ValueError, match="is quantized already"):
        quantize_folder(str(out), tmp_path / "twice")
    change_config(tmp_path / "opt", hidden_size=63)
    (tmp_path / "opt" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no safetensors in"):
        quantize_folder(str(tmp_path / "opt"), tmp_path / "none")


def test_a_matrix_that_is_lacking_is_named(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 matrices, among them \['model.layers.2.mlp.up"):
        quantize_folder(str(tmp_path / "source"), tmp_path / "out")


def test_nothing_half_written_is_left(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    "Nor is anything that was there lost."
    calls = []

    def breaks(numbers: torch.Tensor, bits: int) -> torch.Tensor:
        calls.append(numbers)
        if len(calls) == 5:
            raise OSError(28, "No space left on device")
        return numbers

    monkeypatch.setattr(quantize, "pack_int32", breaks)
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"out=.* cannot be written: .*No space left"):
        quantize_folder(str(source), out)
    assert list(tmp_path.iterdir()) == [] and len(calls) == 5
    monkeypatch.undo()
    out.mkdir()
    quantize_folder(str(source), out)  # an empty folder is as good as none
    before = sorted(path.name for path in out.iterdir())
    with pytest.raises(ValueError, match="out=.* is there already"):
        quantize_folder(str(source), out)
    assert sorted(path.name for path in out.iterdir()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("scheme", FOUR_BITS)
def test_the_same_bytes_twice(source: Path, tmp_path: Path, scheme: str) -> None:
    text = calibration(tmp_path) if SCHEMES[scheme].calibrated else None
    folders = [
        quantize_folder(str(source), tmp_path / name, scheme, calibration=text) for name in "ab"
    ]
    a, b = (load_file(folder / "model.safetensors") for folder in folders)
    assert a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)
