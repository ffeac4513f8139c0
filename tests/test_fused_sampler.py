"""The fused sampling kernel draws by `inverse_cdf`'s law, whatever the logits hold, and compiles
for real chips.
"""

import os
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():  # Triton must know before it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from helpers import run_compiling  # noqa: E402

from teachvllm import LLM, SamplingParams  # noqa: E402
from teachvllm.attention.cpu import TorchSDPABackend  # noqa: E402
from teachvllm.gpu_kernels import sampler as fused_sampler  # noqa: E402
from teachvllm.gpu_kernels import utils as triton_utils  # noqa: E402
from teachvllm.kernels import KERNELS, KernelTable, platform_kernels  # noqa: E402
from teachvllm.model_executor import sampler  # noqa: E402
from teachvllm.model_executor.sampler import Sampler, SamplingMetadata, inverse_cdf  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEARLY_ONE = 1 - 2**-23
sample_rows = fused_sampler.sample_rows


def sample(
    logits: torch.Tensor, temperature: list[float], uniform: list[float], block: int = 4096
) -> list[int]:
    columns = [
        torch.tensor(column, dtype=torch.float32, device=DEVICE)
        for column in (temperature, uniform)
    ]
    with patch.object(fused_sampler, "BLOCK", block), np.errstate(invalid="ignore"):
        ids = sample_rows(logits.to(DEVICE), *columns)
    assert ids.dtype == torch.int64 and ids.shape == (len(logits),)
    return ids.tolist()


def interval(row: torch.Tensor, temperature: float, token: int) -> tuple[float, float, float]:
    """Where the token begins and ends in the row's cumulative distribution, and its probability:
    float64.
    """
    probs = (row.double() / temperature).softmax(-1)
    ends = probs.cumsum(-1)
    return float(ends[token] - probs[token]), float(ends[token]), float(probs[token])


@st.composite
def batches(draw):
    "Rows of logits with bans, ties and any spread; a temperature and a number for each."
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = draw(st.integers(1, 4))
    vocab = draw(st.integers(1, 300))
    logits = torch.from_numpy(
        rng.normal(size=(rows, vocab)) * draw(st.sampled_from([0.0, 1.0, 8.0, 50.0]))
    ).float()
    logits = logits.to(draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])))
    banned = rng.random((rows, vocab)) < draw(st.sampled_from([0.0, 0.5, 0.95]))
    banned[np.arange(rows), rng.integers(0, vocab, rows)] = False  # a token is left
    logits[torch.from_numpy(banned)] = -torch.inf
    temperature = draw(
        st.lists(st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0]), min_size=rows, max_size=rows)
    )
    numbers = st.one_of(
        st.sampled_from([0.0, NEARLY_ONE]), st.integers(0, 2**23 - 1).map(lambda i: i * 2.0**-23)
    )
    return (
        logits,
        temperature,
        draw(st.lists(numbers, min_size=rows, max_size=rows)),
        draw(st.sampled_from([16, 64, 512])),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(batches())
def test_every_row_draws_by_the_law(batch):
    logits, temperature, uniform, block = batch
    for row, heat, u, token in zip(
        logits.float(), temperature, uniform, sample(logits, temperature, uniform, block)
    ):
        if heat == 0:
            assert token == int(row.argmax())
        else:
            start, end, prob = interval(row, heat, token)
            assert prob > 0 and start - 1e-6 <= u <= end + 1e-6, (start, u, end)


def test_the_law_exactly():
    "N evenly spread numbers: a token comes N times its probability, to within one draw."
    n = 200
    row = torch.randn(30, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(
        torch.tensor(sample(row.expand(n, 30), [0.6] * n, [(i + 0.5) / n for i in range(n)], 16))
    )
    exact = n * (row.double() / 0.6).softmax(-1)
    assert (torch.nn.functional.pad(counts, (0, 30 - len(counts))) - exact).abs().max() < 1


def test_a_whole_vocabulary_as_torch():
    logits = torch.randn(6, 151_936, generator=torch.Generator().manual_seed(1)) * 2
    temperature = [0.0, 1.0, 0.7, 1.3, 0.0, 1.0]
    uniform = [0.1, 0.9, 0.5, NEARLY_ONE, 0.2, 0.0]
    heat = torch.tensor(temperature).clamp(min=1e-3)[:, None]
    drawn = inverse_cdf((logits / heat).softmax(-1), torch.tensor(uniform))
    expected = torch.where(torch.tensor(temperature) == 0, logits.argmax(-1), drawn)
    for row, (mine, other) in enumerate(
        zip(sample(logits, temperature, uniform), expected.tolist(), strict=True)
    ):
        if mine != other:  # only at a border between two tokens, where one sum is rounded otherwise
            cdf = (logits[row].double() / heat[row]).softmax(-1).cumsum(-1)
            first, last = sorted((mine, other))
            assert (cdf[first:last] - uniform[row]).abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", [40, 41])
def test_nan_gives_minus_one_and_other_nonsense_a_token_that_exists(temperature: float, size: int):
    "Wherever the NaN is: in the first block, the last, the only logit that is not banned."
    nan = torch.nan
    inf = torch.inf
    rest = size - 1
    rows = torch.tensor(
        [[nan] * size, [nan] + [0.0] * rest, [0.0] * rest + [nan], [-inf] * rest + [nan]]
    )
    others = torch.tensor([[-inf] * size, [inf, inf] + [0.0] * (size - 2)])
    healthy = torch.arange(float(size))[None]
    ids = sample(torch.cat([rows, others, healthy]), [temperature] * 7, [NEARLY_ONE] * 7, 16)
    assert ids[:4] == [-1] * 4 and all(0 <= token < size for token in ids[4:]) and ids[-1] == rest


def test_rows_of_something_wider():
    wide = torch.randn(3, 500, generator=torch.Generator().manual_seed(2))
    arguments = [0.0, 1.0, 1.0], [0.5, 0.5, 0.9], 64
    assert sample(wide[:, 7:407], *arguments) == sample(wide[:, 7:407].contiguous(), *arguments)


def test_the_sampler_draws_the_same_with_it():
    """Greedy, plain, filtered and banned rows in one batch, some with a NaN: with the kernel as
    without.
    """
    generator = torch.Generator().manual_seed(3)
    num_rows = 24
    vocab = 400
    logits = torch.randn(num_rows, vocab, generator=generator) * 3
    logits[-3:, 17] = torch.nan
    temperature = torch.tensor([0.0, 0.8, 1.0] * 8)
    filtered = (temperature == 1.0).nonzero()[:, 0]
    columns = {
        "temperature": temperature,
        "top_p": torch.where(temperature == 1, 0.7, 1.0),
        "top_k": torch.full((num_rows,), vocab),
        "min_p": torch.zeros(num_rows),
        "uniform": torch.rand(num_rows, generator=generator),
        "plain_rows": (temperature == 0.8).nonzero()[:, 0],
        "filtered_rows": filtered,
        "scored_rows": torch.tensor([0, 1, 2]),
    }
    columns = {name: column.to(DEVICE) for name, column in columns.items()}
    banned = torch.arange(3, device=DEVICE)[:, None], logits[:3].topk(2).indices.to(DEVICE)
    meta = SamplingMetadata(False, **columns, num_top=2, banned=banned)
    answers = [Sampler(table)(logits.clone().to(DEVICE), meta) for table in (None, with_kernel())]
    (ids, logprobs), (fused_ids, fused_logprobs) = answers
    assert torch.equal(ids, fused_ids) and torch.equal(logprobs.logprobs, fused_logprobs.logprobs)
    assert (
        int(ids[0]) not in banned[1][0].tolist()
        and ids[-4:].tolist()[1:] == [-1] * 3
        and (ids[:-3] >= 0).all()
    )
    greedy = SamplingMetadata(
        True, **columns | {"temperature": torch.zeros(num_rows, device=DEVICE)}
    )
    assert torch.equal(
        Sampler(with_kernel())(logits.to(DEVICE), greedy)[0],
        Sampler()(logits.to(DEVICE), greedy)[0],
    )
    # a model's own dtype is as good: what is computed is computed in float32
    half = logits.bfloat16().to(DEVICE)
    for sampling in (meta, replace(meta, banned=None), greedy):
        expected = Sampler()(half.float(), sampling)
        for table in (None, with_kernel()):
            ids, logprobs = Sampler(table)(half.clone(), sampling)
            assert torch.equal(ids, expected[0])
            assert torch.equal(logprobs.logprobs, expected[1].logprobs)
    # the kernel is asked whether it takes them: it has no loads of float64
    assert torch.equal(
        Sampler(with_kernel())(logits.double().to(DEVICE), greedy)[0],
        Sampler()(logits.to(DEVICE), greedy)[0],
    )


def with_kernel() -> KernelTable:
    names = {"sample": "sample_rows", "sample_sorted": "sample_sorted"}
    return KernelTable({k: f"teachvllm.gpu_kernels.sampler.{v}" for k, v in names.items()})


def test_rows_that_need_more_candidates_are_not_sorted():
    """The tokens of a draw from the sorted row: ties, bans and every filter among them; another row
    is left alone.
    """
    vocab = 100
    settings = [  # top_k, top_p, min_p, uniform
        (vocab, 0.9, 0.0, 0.8),
        (9, 1.0, 0.0, NEARLY_ONE),
        (30, 0.8, 0.01, 0.5),
        (vocab, 1.0, 0.2, 0.9),
        (9, 1e-30, 0.0, NEARLY_ONE),
        (vocab, 0.95, 0.0, 0.7),
        (2, 1.0, 0.0, 0.1),  # has enough candidates
    ]
    logits = torch.randn(len(settings), vocab, generator=torch.Generator().manual_seed(4))
    logits[3:] = logits[3:].round()
    logits[::2, 5::7] = -torch.inf
    rows = torch.arange(len(settings), device=DEVICE)
    columns = [torch.tensor(column, device=DEVICE) for column in zip(*settings, strict=True)]
    meta = SamplingMetadata(
        greedy=False,
        temperature=torch.ones(len(settings), device=DEVICE),
        **dict(zip(("top_k", "top_p", "min_p", "uniform"), columns, strict=True)),
        plain_rows=rows[:0],
        filtered_rows=rows,
        scored_rows=rows[:0],
    )
    probs = logits.to(DEVICE).softmax(-1)
    drawn = []
    with patch.object(sampler, "MAX_CANDIDATES", 3), patch.object(fused_sampler, "BLOCK", 64):
        for table in (KernelTable(), with_kernel()):
            with np.errstate(all="ignore"):
                drawn.append(sampler.sample_filtered(probs, meta, rows, table).tolist())
    assert drawn[0] == drawn[1] and len(set(drawn[0])) > 4
    likeliest = probs.topk(3).indices.tolist()
    others = [token in top for token, top in zip(drawn[0], likeliest, strict=True)]
    assert others.count(False) >= 4 and others[4] and others[6]  # most had to look further


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(1, 9000), st.integers(1, 5), st.integers(0, 9))
def test_what_a_grammar_forbids(vocab_size, num_masks, seed):
    "As torch's form, NaN and rows without a token included; other rows stay."
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, vocab_size + 3, generator=generator)[:, 1 : vocab_size + 1].to(DEVICE)
    logits[seed % 7, 0] = torch.nan
    rows = torch.randperm(7, generator=generator)[:num_masks].to(DEVICE)
    shape = (num_masks, -(-vocab_size // 8))
    bits = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(DEVICE)
    bits[0] = 0
    ours, theirs = logits.clone(), logits.clone()
    assert fused_sampler.apply_bitmask.serves(ours, rows, bits)
    fused_sampler.apply_bitmask(ours, rows, bits)
    sampler.apply_grammar_bitmask(theirs, rows, bits)
    assert torch.equal(ours.nan_to_num(9), theirs.nan_to_num(9))
    assert vocab_size == 1 or not fused_sampler.apply_bitmask.serves(ours.T, rows, bits)


@pytest.mark.parametrize(
    "broken", ["gpu_kernels.sampler.sample_kernel", "gpu_kernels.attention.unified_attention"]
)
def test_triton_that_cannot_launch_is_given_up(broken, folder):
    "It is imported, and finds no C compiler at its first launch: the engine starts with torch."

    class CannotLaunch:
        def __getitem__(self, grid):
            raise RuntimeError("Failed to find C compiler")

    options = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "device": DEVICE,
        "num_gpu_blocks_override": 16,
    }
    with patch.dict(KERNELS, cpu=KERNELS["cuda"]), patch(f"teachvllm.{broken}", CannotLaunch()):
        with LLM(folder, **options) as llm:
            (runner,) = llm.collective_rpc(lambda worker: worker.model_runner)
            assert runner.context.attn_backend is TorchSDPABackend
            assert runner.sampler.kernels.find("sample") is None
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            (output,) = llm.generate([1, 2, 3], params, use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 3
        if "attention" in broken:
            with pytest.raises(ValueError, match="attention_backend=triton .*C compiler"):
                LLM(folder, attention_backend="triton", **options)


def find(device: str) -> object:
    return platform_kernels(device).find("sample")


def test_who_can_run_it():
    assert find("cpu") is None
    with patch.object(triton_utils, "interpreted", lambda: False):
        for capability, runs in (((7, 0), False), ((7, 5), True), ((9, 0), True)):
            with patch("torch.cuda.get_device_capability", return_value=capability):
                assert find("cuda:0") is (sample_rows if runs else None)
    with patch.dict(sys.modules, {"teachvllm.gpu_kernels.sampler": None}):
        assert find("cuda:0") is None


def test_nothing_imports_triton_for_it():
    code = (
        "import sys; sys.modules['triton'] = None; import teachvllm.worker.model_runner; from "
        "teachvllm.kernels import platform_kernels"
    )
    code += "; assert platform_kernels('cuda:0').find('sample') is None"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=800)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from teachvllm.gpu_kernels.sampler import BLOCK, bitmask_kernel, sample_kernel, sample_sorted_kernel
from teachvllm.gpu_kernels.sass import machine_code, resources

for capability in (75, 80, 89, 90):
    for dtype, vocab, divisor in (("fp32", 151936, 16), ("fp16", 32000, 16), ("fp32", 50257, 1), ("bf16", 100, 4)):
        if dtype == "bf16" and capability < 80 or capability == 89 and divisor < 16:
            continue
        block = min(BLOCK, triton.next_power_of_2(vocab))
        types = ["*i64", "*" + dtype, "*fp32", "*fp32", "i32", "i32", "constexpr", "constexpr"]
        sizes = {"BLOCK": block, "NUM_BLOCKS": triton.next_power_of_2(triton.cdiv(vocab, block))}
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(6 if divisor == 16 else 4)}
        source = ASTSource(sample_kernel, dict(zip(sample_kernel.arg_names, types)), sizes, aligned)
        options = {"num_warps": max(1, block // 512)}
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert kernel.metadata.shared <= 64 * 1024 and resources(kernel.asm["cubin"])[1] == 0
        # rows of 50,257 begin anywhere
        assert dtype != "fp16" or machine_code(kernel).load_width == 16
        print(capability, dtype, vocab)
types = ["*i64", "*i1", "*fp32", "*i64", "*i64", *["*fp32"] * 3, "i32", "i32", "constexpr"]
names = sample_sorted_kernel.arg_names
source = ASTSource(sample_sorted_kernel, dict(zip(names, types)), {"BLOCK": BLOCK})
kernel = triton.compile(source, target=GPUTarget("cuda", 75, 32), options={"num_warps": 16})
assert resources(kernel.asm["cubin"])[1] == 0
print("sorted", kernel.metadata.shared)
types = ["*fp32", "*i64", "*u8", "i32", "i32", "i32", "constexpr"]
signature = dict(zip(bitmask_kernel.arg_names, types))
aligned = {(i,): [["tt.divisibility", 16]] for i in range(6)}
for capability in (75, 80, 90):
    source = ASTSource(bitmask_kernel, signature, {"BLOCK": BLOCK}, aligned)
    target = GPUTarget("cuda", capability, 32)
    kernel = triton.compile(source, target=target, options={"num_warps": 8})
    assert resources(kernel.asm["cubin"])[1] == 0 and machine_code(kernel).load_width == 16
    print("bitmask", capability)
"""


def test_it_compiles_for_real_chips():
    child = run_compiling("-c", COMPILE)
    assert len(child.stdout.splitlines()) == 17
