"""The kernels' own arithmetic, with the processor's instructions and without them."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")

ROUND = """
import numpy as np, torch
from teachvllm.cpu_kernels.utils import compiled, exp2, host_features, store

@compiled
def round_all(x, out):
    for i in range(len(x)):
        store(out, i, x[i])

@compiled
def powers(x, out):
    for i in range(len(x)):
        out[i] = exp2(x[i])

ties = [1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20]
edges = [np.nan, np.inf, -np.inf, 0.0, -0.0, np.finfo(np.float32).max, -3e38, 1e-37]
x = np.float32(ties + edges + np.random.default_rng(0).standard_normal(10_000).tolist())
out = np.empty(len(x), np.uint16)
round_all(x, out)
right = torch.from_numpy(x).bfloat16()
got = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
assert torch.equal(got.isnan(), right.isnan()) and torch.equal(got.nan_to_num(), right.nan_to_num())
tiny = np.full(16, 1e-40, np.float32)  # no normal bfloat16 is as small
round_all(tiny, out[:16])
native = bool(host_features().get("avx512bf16"))
assert out[0] == (0 if native else torch.tensor(1e-40).bfloat16().view(torch.int16).item()), (native, out[0])
t = np.float32([0, -0.5, -3, -124.7, -126, -1e30, -np.inf, np.nan])
power = np.empty_like(t)
powers(t, power)
assert np.allclose(power[:4], np.exp2(t[:4].astype(np.float64)), rtol=1e-6) and (power[4:7] < 1e-37).all() and np.isnan(power[7])
print("native" if native else "by bits")
"""


@pytest.mark.parametrize("avx", ["1", "0"])
def test_rounds_to_bfloat16_as_torch_does(avx, tmp_path):
    env = os.environ | {"NUMBA_ENABLE_AVX": avx, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", ROUND], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if avx == "0":
        assert done.stdout.strip() == "by bits"
