"""The products of a CPU as processors with other instructions compile them: each in a process of
its own, that sees those, and with a cache of its own.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")

from teachvllm.cpu_kernels import utils  # noqa: E402

PRODUCTS = """
import sys
from types import SimpleNamespace
import torch
from torch.nn import functional as F
from teachvllm.cpu_kernels import utils
found = dict(utils.host_features()) | {name: False for name in sys.argv[1:]}
utils.host_features = lambda: found
from teachvllm.cpu_kernels import grouped, linear
torch.manual_seed(0)
torch.set_num_threads(1)

def close(mine, right, error):
    assert mine.dtype == torch.bfloat16
    worst = ((mine.float() - right).abs().max() / right.abs().max()).item()
    assert worst < error, worst

weight, bias = torch.randn(128, 96).bfloat16(), torch.randn(128).bfloat16()
assert linear.serves(weight) == found["avx512f"]
packed = linear.pack(weight)
size, width = 70, 128
numbers = torch.randint(0, 16, (size, width), dtype=torch.uint8)
scales, minima = torch.rand(2, size, width // 32).half()
groups = SimpleNamespace(
    bits=4, shape=(size, width), numbers=numbers[:, ::2] | numbers[:, 1::2] << 4,
    unpack=lambda: numbers, scales=scales, zeros=8, minima=minima, order=None, groups=None,
)
plain = numbers.float() * scales.repeat_interleave(32, 1) + minima.repeat_interleave(32, 1)
assert grouped.serves(groups, torch.bfloat16)
four = grouped.PackedGroups(groups, torch.bfloat16)
assert four.form.exact != bool(found["avx512vnni"])
for n in (1, 2, 3, 4, 9):
    x = torch.randn(n, 96).bfloat16()
    close(linear.linear(x, packed, bias), F.linear(x.float(), weight.float(), bias.float()), 4e-3)
    x = torch.randn(n, width).bfloat16()
    close(four(x), x.float() @ plain.T, 4e-3 if four.form.exact else 2e-2)
x[0, 0], x[1, 1] = float("nan"), float("inf")
assert four(x).isfinite().all(1).tolist() == [False, False] + [True] * 7
scaled = SimpleNamespace(weight=torch.ones(64, 32, dtype=torch.int8), block=None)
assert grouped.serves_scaled(scaled, torch.bfloat16) == bool(found["avx512vnni"])
"""

EXACT = """
import sys
import torch
from teachvllm.cpu_kernels import utils
found = dict(utils.host_features())
if len(sys.argv) > 1:  # with the other kind's loop
    found["avx512f"] = not found.get("avx512f")
utils.host_features = lambda: found
from teachvllm.cpu_kernels import grouped
from teachvllm.quantization.grouped import GroupedWeight
torch.manual_seed(0)
torch.set_num_threads(1)
numbers = torch.randint(0, 16, (70, 128), dtype=torch.uint8)
scales, minima = torch.rand(2, 70, 4).half()
weight = GroupedWeight(numbers, scales, 0, 4, minima=minima)
product = grouped.PackedGroups(weight, torch.float32)
right = weight.dequantize(torch.float32)
bits = []
for rows in range(1, 6):
    x = torch.randn(rows, 128)
    torch.testing.assert_close(product(x), x @ right.T, atol=1e-3, rtol=1e-4)
    bits += product(x).view(torch.int32).flatten().tolist()
print(hash(tuple(bits)))
"""


@pytest.mark.skipif(not utils.host_features().get("fma"), reason="a processor without FMA")
@pytest.mark.skipif(not utils.find_openmp(), reason="no threads of GNU OpenMP")
def test_sums_in_parts_are_the_same_sums(tmp_path):
    "Whether all of a tile's sums are kept at once, or as many as there are registers."
    found = []
    for other in ([], ["other"]):
        env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / str(len(other)))}
        command = [sys.executable, "-c", EXACT, *other]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split()[-1])
    assert found[0] == found[1]


@pytest.mark.parametrize("lacks", [["avx512bf16"], ["avx512bf16", "avx512vnni"]])
def test_bfloat16_without_an_instruction(lacks, tmp_path):
    if not (utils.host_features().get("avx512f") and utils.find_openmp()):
        pytest.skip("a processor without registers of 64 bytes, or no threads of GNU OpenMP")
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PRODUCTS, *lacks]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
