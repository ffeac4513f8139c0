"""Kernels are asked for by name: an engine without them, or with broken ones, gives the same
tokens.
"""

import ast
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers import random_prompts, runner_of
from tqdm import tqdm

from teachvllm import LLM, SamplingParams, kernels
from teachvllm.attention.backend import AttentionMetadata, ReferenceBackend, get_attn_backend
from teachvllm.attention.cpu import HEAD_FIRST, TorchSDPABackend
from teachvllm.kernels import KernelTable, platform_kernels, takes
from teachvllm.model_executor.layers import ActAndMul, RMSNorm, use_kernels
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
    with patch.dict(kernels.KERNELS, cpu={}), LLM(folder, **OPTIONS) as llm:
        runner = runner_of(llm)
        table = runner.context.kernels
        assert not table.names and runner.graphs is None
        assert runner.context.attn_backend is TorchSDPABackend
        tables = [m.kernels for m in runner.model.modules() if hasattr(m, "kernels")]
        assert len(tables) > 10 and all(found is table for found in tables)
        assert answers(llm) == expected


def test_attention_is_what_the_table_says(folder: str, expected: list[list[int]]) -> None:
    "Another class under the name is used, as another kernel of any operation is."
    reference = "teachvllm.attention.backend.ReferenceBackend"
    with patch.dict(kernels.KERNELS["cpu"], attention=reference), LLM(folder, **OPTIONS) as llm:
        layers = runner_of(llm).attention_layers.values()
        assert {type(layer.backend) for layer in layers} == {ReferenceBackend}
        assert answers(llm) == expected
    table = platform_kernels("cpu")
    table.register("attention", reference)
    what = ("cpu", torch.float32, 16, 16)
    assert get_attn_backend(None, *what, kernels=table) is ReferenceBackend


def test_each_operation_has_a_form_in_torch() -> None:
    "Beside its kernel, where this machine has it: equal but for the last bits."
    torch.manual_seed(0)
    x = torch.randn(7, 64)
    heads = torch.randn(7, 4, 16)
    norm = RMSNorm(64, 1e-5)
    norm.weight.data = torch.rand(64)
    rotary = RotaryEmbedding(torch.rand(8), 1.0, 100)
    turn = ApplyRotaryEmb()
    parts = torch.nn.ModuleList([norm, ActAndMul("silu"), rotary, turn])

    def run() -> list[torch.Tensor]:
        return [
            norm(x),
            *norm(x, x),
            parts[1](x),
            turn(heads, rotary(torch.arange(7))),
        ]

    plain = run()
    use_kernels(parts, platform_kernels("cpu"))
    for one, other in zip(run(), plain, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def too_wide(n: int, size: int) -> torch.Tensor:
    "Rows that lie in one another's place."
    return torch.randn(size).expand(n, size)


@pytest.mark.parametrize(
    "name, args",
    [
        ("rms_norm", (torch.randn(3, 8), torch.ones(6))),
        ("rms_norm", (torch.randn(3, 8), torch.ones(8).bfloat16())),
        ("rms_norm", (torch.randn(3, 8), torch.ones(8), torch.randn(2, 8))),
        ("rms_norm", (torch.randn(3, 2, 8), torch.ones(8), torch.randn(3, 2, 8))),
        ("rms_norm", (torch.randn(2, 3, 8).transpose(0, 1), torch.ones(8))),
        ("rms_norm", (too_wide(3, 8), torch.ones(8))),
        ("rms_norm", (too_wide(3, 16).view(3, 2, 8), torch.ones(8))),
        ("act_and_mul", (torch.randn(3, 7), "silu")),
        ("act_and_mul", (torch.randn(8, 3).T, "silu")),
        ("act_and_mul", (torch.randn(3, 8), "tanh")),
        ("rotary_embedding", (torch.randn(3, 2, 8), *torch.randn(2, 3, 4))),
        ("rotary_embedding", (torch.randn(3, 2, 8), *torch.randn(2, 3, 1, 4, 2))),
        ("rotary_embedding", (torch.randn(3, 2, 8), *torch.randn(2, 3, 1, 4, 0))),
        ("rotary_embedding", (torch.randn(3, 2, 8), *torch.randn(2, 2, 1, 4))),
        ("rotary_embedding", (torch.randn(3, 2, 8), *torch.randn(2, 3, 1, 5))),
        ("rotary_embedding", (torch.randn(3, 2, 8), *torch.randn(2, 3, 1, 10))),
        ("rotary_embedding", (torch.randn(3, 2, 8), torch.randn(3, 1, 4), torch.randn(3, 1, 6))),
        ("embedding", (torch.randn(7, 8), torch.tensor([[1]]))),
        ("embedding", (torch.randn(7, 8), torch.tensor([1], dtype=torch.int32))),
        ("embedding", (torch.randn(7, 8), torch.arange(6)[::2])),
        ("embedding", (torch.randn(8, 7).T, torch.tensor([1]))),
        ("embedding", (torch.randn(0, 8), torch.tensor([1]))),
    ],
)
def test_what_a_kernel_would_read_wrongly_is_left_to_torch(name: str, args: tuple) -> None:
    "Kernels check nothing when they are called: the question before is the only guard."
    table = platform_kernels("cpu")
    if table.find(name) is None:
        pytest.skip("this machine has no such kernel")
    assert table.get(name, *args) is None


def test_an_attribute_of_that_name_need_not_be_a_table() -> None:
    "A plugin's layer may have kernels of another kind."
    pyramid = torch.nn.Module()
    pyramid.kernels = [3, 5, 7]  # type: ignore[assignment]
    table = platform_kernels("cpu")
    parts = torch.nn.ModuleList([pyramid, ActAndMul("silu")])
    use_kernels(parts, table)
    assert pyramid.kernels == [3, 5, 7] and parts[1].kernels is table


BREAKS = {  # what a module `numba` of our own does when it is imported
    "refuses this NumPy": "raise ImportError('Numba needs NumPy 2.2 or less. Got NumPy 2.4.')",
    "another error": "raise RuntimeError('could not find LLVM')",
    "not what it was": "",  # it has nothing of what we use
    "leaves": "raise AttributeError('_ARRAY_API not found')",
}

CODE = """
import json, sys
from teachvllm import LLM, SamplingParams
folder, prompts, options, first = json.loads(sys.argv[1])
exec(first)
with LLM(folder, **options) as llm:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


def start(path: Path, folder: str, first: str = "") -> tuple[list[list[int]], list[str]]:
    """In a process of its own that runs the code `first`, with the folder `path` before all others
    and for what Numba keeps: tokens, and warnings.
    """
    command = [sys.executable, "-c", CODE, json.dumps([folder, PROMPTS, OPTIONS, first])]
    places = os.pathsep.join([str(path), str(PACKAGE.parent)])
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": places, "NUMBA_CACHE_DIR": str(path)},
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
    tokens, warnings = start(tmp_path, folder)
    assert tokens == expected
    (warning,) = warnings
    assert "cpu_kernels is not used, torch does its work" in warning
    is_remedy = "pip install 'teachvllm[numba]'" in warning
    assert is_remedy == (name in ("refuses this NumPy", "not what it was"))


needs_numba = pytest.mark.skipif(
    platform_kernels("cpu").find("rms_norm") is None, reason="no Numba"
)


@needs_numba
def test_a_numba_that_is_too_old_is_not_used(
    folder: str, expected: list[list[int]], tmp_path: Path
) -> None:
    "The package's extra asks for a newer one; but nobody need have installed by that."
    found = start(tmp_path, folder, "import numba; numba.__version__ = '0.61.2'")
    tokens, (warning,) = found
    assert tokens == expected and "Numba 0.61.2 is older than 0.62 (pip install" in warning


@needs_numba
def test_the_oldest_numba_is_the_extras() -> None:
    oldest = ".".join(map(str, import_module("teachvllm.cpu_kernels.utils").OLDEST))
    assert f'"numba>={oldest},' in (PACKAGE.parent / "pyproject.toml").read_text()


CANNOT_COMPILE = {
    "RuntimeError: LLVM is broken": """
from teachvllm.cpu_kernels.utils import Kernel

def broken(self):
    raise RuntimeError("LLVM is broken")

Kernel.compile = broken
""",
    "OSError: [Errno 27] File too large": """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
""",
}


@needs_numba
@pytest.mark.parametrize("error", CANNOT_COMPILE)
def test_an_engine_starts_where_no_kernel_compiles(
    error: str, folder: str, expected: list[list[int]], tmp_path: Path
) -> None:
    "A compiler that breaks, a disk that is full: torch does the work, attention included."
    tokens, (warning,) = start(tmp_path, folder, CANNOT_COMPILE[error])
    assert tokens == expected
    assert f"cpu_kernels is not used, torch does its work, slower: {error}" in warning


@needs_numba
@pytest.mark.parametrize("broken", ["attention.compile_all", "fused_ops.compile"])
def test_a_folder_is_used_whole_or_not_at_all(
    broken: str, folder: str, expected: list[list[int]]
) -> None:
    "Whichever of its modules cannot be compiled."
    with (
        patch(f"teachvllm.cpu_kernels.{broken}", side_effect=OSError("no space")),
        LLM(folder, **OPTIONS) as llm,
    ):
        runner = runner_of(llm)
        assert not any(runner.context.kernels.find(name) for name in kernels.KERNELS["cpu"])
        layers = runner.attention_layers.values()
        assert {type(layer.backend) for layer in layers} == {TorchSDPABackend}
        assert answers(llm) == expected


@needs_numba
def test_attention_that_was_asked_for_by_name_must_compile(folder: str) -> None:
    with (
        patch("teachvllm.cpu_kernels.attention.compile_all", side_effect=OSError("no space")),
        pytest.raises(ValueError, match=r"attention_backend=numba .*OSError: no space"),
    ):
        LLM(folder, attention_backend="numba", **OPTIONS)


def test_what_cannot_be_used_is_said_once_in_a_process(caplog: pytest.LogCaptureFixture) -> None:
    kernels.warn_once.cache_clear()
    with patch.dict(sys.modules, {"teachvllm.cpu_kernels.fused_ops": None}):
        for _ in range(2):
            assert platform_kernels("cpu").find("act_and_mul") is None
    (record,) = caplog.records
    assert record.message.endswith("(pip install 'teachvllm[numba]')")


def test_the_version_says_that_kernels_have_changed() -> None:
    table = KernelTable({"double": f"{__name__}.double", "other": "nowhere.fast.other"})
    versions = [table.version]
    table.find("double")
    assert table.version == versions[0]
    table.register("double", f"{__name__}.double")
    versions.append(table.version)
    table.find("other")  # its folder is given up
    versions.append(table.version)
    assert versions == sorted(set(versions))


@needs_numba
@pytest.mark.parametrize(("hits", "what"), [(1, "loading the test"), (0, "compiling the test")])
def test_the_bar_says_whether_kernels_are_compiled_or_loaded(hits: int, what: str) -> None:
    utils = import_module("teachvllm.cpu_kernels.utils")
    bar = io.StringIO()

    class Slow:
        entry: Any = None

        def compile(self) -> None:
            self.entry = SimpleNamespace(cache_hits=hits)

    def at_once(kernels: Any, what: str, delay: float) -> Any:
        return tqdm(kernels, what, file=bar, mininterval=0)

    with patch.object(utils, "tqdm", at_once):
        utils.compile_all([Slow(), Slow()], "the test")
    assert bar.getvalue().split("\r")[-1].startswith(what)


@needs_numba
def test_a_compiler_that_breaks_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    "It was imported, and fails when it compiles: all kernels of its folder are torch's again."
    table = platform_kernels("cpu")
    kernels.warn_once.cache_clear()
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
    """Numba is imported by `cpu_kernels` alone, Triton by `gpu_kernels`, the bench of a GPU and the
    pretended one; and no layer, sampler or worker imports from either folder.
    """
    for name, tree in modules():
        home = name.split(".")[0]
        found = {module for module, _ in imported(name, tree)}
        roots = {module.split(".")[0] for module in found}
        if home not in ("cpu_kernels", "exercises"):
            assert not roots & {"numba", "llvmlite"}, name
        if home not in ("gpu_kernels", "exercises", "bench_gpu", "pretend"):
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
