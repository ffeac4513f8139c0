"""Kernels are asked for by name: an engine without them, or with broken ones, gives the same
tokens.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import random_prompts

from teachvllm import LLM, SamplingParams, kernels
from teachvllm.attention.backend import AttentionMetadata, ReferenceBackend
from teachvllm.attention.cpu import HEAD_FIRST
from teachvllm.kernels import KernelTable, platform_kernels, takes
from teachvllm.model_executor.layers import ActAndMul, Add, RMSNorm, use_kernels
from teachvllm.model_executor.rotary_embedding import ApplyRotaryEmb, RotaryEmbedding

PACKAGE = Path(__file__).parents[1] / "teachvllm"
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "device": "cpu",
    "num_gpu_blocks_override": 64,
    "swap_space": 0.001,
}
PROMPTS = random_prompts(5, 40)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def answers(llm: LLM) -> list[list[int]]:
    return [
        list(output.outputs[0].token_ids)
        for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    ]


@pytest.fixture(scope="module")
def expected(folder: str) -> list[list[int]]:
    "With all kernels that this machine has."
    with LLM(folder, **OPTIONS) as llm:
        return answers(llm)


def test_an_empty_table_leaves_all_to_torch(folder: str, expected: list[list[int]]) -> None:
    "Every operation has its form in torch: no kernel is found, and the tokens are equal."
    with (
        patch.dict(kernels.KERNELS, cpu={}),
        LLM(folder, attention_backend="torch_sdpa", **OPTIONS) as llm,
    ):
        (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
        table = runner.context.kernels
        assert not table.names and runner.graphs is None
        tables = [m.kernels for m in runner.model.modules() if hasattr(m, "kernels")]
        assert len(tables) > 10 and all(found is table for found in tables)
        assert answers(llm) == expected


def test_each_operation_has_a_form_in_torch() -> None:
    "Beside its kernel, where this machine has it: equal but for the last bits."
    torch.manual_seed(0)
    x = torch.randn(7, 64)
    heads = torch.randn(7, 4, 16)
    norm = RMSNorm(64, 1e-5)
    norm.weight.data = torch.rand(64)
    rotary = RotaryEmbedding(torch.rand(8), 1.0, 100)
    turn = ApplyRotaryEmb()
    parts = torch.nn.ModuleList([norm, ActAndMul("silu"), Add(), rotary, turn])

    def run() -> list[torch.Tensor]:
        return [
            norm(x),
            *norm(x, x),
            parts[1](x),
            parts[2](x, x),
            turn(heads, rotary(torch.arange(7))),
        ]

    plain = run()
    use_kernels(parts, platform_kernels("cpu"))
    for one, other in zip(run(), plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


BREAKS = {  # what a module `numba` of our own does when it is imported
    "too old": "raise ImportError('Numba needs NumPy 2.2 or less. Got NumPy 2.4.')",
    "another error": "raise RuntimeError('could not find LLVM')",
    "not what it was": "",  # it has nothing of what we use
    "leaves": "raise AttributeError('_ARRAY_API not found')",
}

CODE = """
import json, sys
from teachvllm import LLM, SamplingParams
folder, prompts, options = json.loads(sys.argv[1])
with LLM(folder, **options) as llm:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


def start_with_numba(path: Path, folder: str) -> tuple[list[list[int]], list[str]]:
    "In a process of its own, with the folder `path` before all others: tokens, and warnings."
    command = [sys.executable, "-c", CODE, json.dumps([folder, PROMPTS, OPTIONS])]
    places = os.pathsep.join([str(path), str(PACKAGE.parent)])
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": places},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line]
    return json.loads(done.stdout.splitlines()[-1]), warnings


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_numba_costs_speed_and_one_warning(
    name: str, folder: str, expected: list[list[int]], tmp_path: Path
) -> None:
    "It is found, and breaks when it is imported: the engine starts, and gives the same tokens."
    (tmp_path / "numba.py").write_text(BREAKS[name])
    tokens, warnings = start_with_numba(tmp_path, folder)
    assert tokens == expected
    (warning,) = warnings
    assert "cpu_kernels is not used, torch does its work" in warning


def test_a_compiler_that_breaks_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    "It was imported, and fails when it compiles: all kernels of its folder are torch's again."
    table = platform_kernels("cpu")
    if table.find("rms_norm") is None:
        pytest.skip("no Numba")
    with (
        caplog.at_level("WARNING", logger="teachvllm"),
        patch("teachvllm.cpu_kernels.fused_ops.compile", side_effect=OSError("LLVM: no space")),
    ):
        table.compile(torch.float32)
    assert all(table.find(name) is None for name in table.names)
    assert [record.message for record in caplog.records] == [
        "teachvllm.cpu_kernels is not used, torch does its work, slower: OSError: LLVM: no space"
    ]


def test_a_kernel_is_asked_whether_it_takes_what_it_would_get() -> None:
    table = KernelTable({"double": f"{__name__}.double"})
    assert table.get("double", 3)(3) == 6 and table.get("double", "3") is None
    assert table.get("triple", 3) is None
    table.register("triple", f"{__name__}.double")
    assert table.get("triple", 3) is double
    table.register("triple", f"{__name__}.not_there")
    assert table.find("triple") is None


@takes(lambda x: isinstance(x, int))
def double(x: int) -> int:
    return 2 * x


# Attention of chunks that no compiled loop takes


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize(
    "rules", [{}, {"window": 30}, {"soft_cap": 2.0}, {"num_heads": 98, "num_kv_heads": 2}]
)
def test_chunks_that_are_left_are_torchs(rules: dict[str, Any], served: bool) -> None:
    """Beside decoding sequences, in one batch: where the dtype is not served, where one chunk has too
    many keys, and where no loop takes the heads.
    """
    if platform_kernels("cpu").find("attention") is None:
        pytest.skip("no Numba, or no threads of GNU OpenMP")
    from teachvllm.cpu_kernels import attention, linear

    if served and not linear.host_features().get("fma"):
        pytest.skip("a processor without fused multiply-add")
    torch.manual_seed(0)
    news = torch.tensor([1, 1, 40, 150, 7])
    lens = torch.tensor([5, 90, 40, 200, 60])
    size = 16
    options = {"num_heads": 4, "num_kv_heads": 2} | rules
    table = torch.randperm(5 * 13 + 1)[:-1].view(5, 13).int()
    shape = (2, 66, 16, options["num_kv_heads"], size)
    cache = torch.empty_permuted(shape, HEAD_FIRST).normal_()
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), news.cumsum(0)))
    slots = torch.zeros(int(news.sum()), dtype=torch.int64)
    q = torch.randn(int(news.sum()), options["num_heads"], size)
    dtypes = frozenset([torch.float32] if served else [])
    with (
        patch.object(attention, "dtypes_served", lambda: dtypes),
        patch.object(attention, "MOST_BYTES", 4 * 3 * 2 * 64 * (16 + 64)),  # three tiles
    ):
        classes: list[Any] = [ReferenceBackend, attention.NumbaBackend]
        backends = [cls(head_size=size, scale=0.25, **options) for cls in classes]
        found = []
        for backend in backends:
            backend.v_scale = 0.5
            meta = AttentionMetadata(starts, lens, table, slots, 2)
            backend.build(meta, 16)
            found.append(backend.forward(q, cache, meta))
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)
    (plan,) = meta.plans.values()
    whole = served and options["num_heads"] == 4  # but for the chunk of 200 keys, without a window
    assert len(plan.parts) == ((0 if "window" in rules else 2) if whole else 4)


# Who imports what


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield name, ast.parse(path.read_text())


def imported(name: str, tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    "Modules that a module imports, by their whole names, and which names out of each."
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = ["teachvllm", *name.split(".")[: -node.level]] if node.level else []
            yield ".".join([*parents, node.module or ""]), [alias.name for alias in node.names]


def test_layers_know_no_kernels() -> None:
    """Numba is imported by `cpu_kernels` alone, Triton by `gpu_kernels` and the GPU's bench; and no
    layer, sampler or worker imports from either folder.
    """
    for name, tree in modules():
        home = name.split(".")[0]
        found = {module for module, _ in imported(name, tree)}
        roots = {module.split(".")[0] for module in found}
        if home not in ("cpu_kernels", "exercises"):
            assert not roots & {"numba", "llvmlite"}, name
        if home not in ("gpu_kernels", "exercises", "bench_gpu"):
            assert "triton" not in roots, name
        if home in ("attention", "model_executor", "worker", "executor", "engine", "core"):
            assert not [one for one in found if "_kernels" in one], name
        if home not in ("benchmarks", "exercises", "__main__"):
            assert not [one for one in found if "benchmarks" in one], name


def test_no_private_name_crosses_a_module_of_kernels() -> None:
    for name, tree in modules():
        if name.split(".")[0] in ("cpu_kernels", "gpu_kernels"):
            for module, names in imported(name, tree):
                private = [one for one in names if one.startswith("_")]
                assert not (module.startswith("teachvllm") and private), (name, module, private)


def test_importing_layers_imports_no_numba() -> None:
    code = """
import sys
import teachvllm.worker.worker, teachvllm.model_executor.models.llama
assert not [name for name in sys.modules if name.split(".")[0] in ("numba", "llvmlite")]
assert not [name for name in sys.modules if "_kernels" in name and name.startswith("teachvllm")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=PACKAGE.parent)
