"""Side roads can be left out: without their modules the engine serves as before."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tools.chapters import SIDE_ROADS, chapters, texts

ROOT = Path(__file__).resolve().parents[1]
SERVE = """
import sys
from teachvllm import LLM, SamplingParams
import teachvllm
assert teachvllm.__file__.startswith(sys.argv[2]), teachvllm.__file__
prompts = [[5, 6, 7], [5, 6, 8, 9], list(range(3, 40))]
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
with LLM(sys.argv[1], dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=64) as llm:
    print([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
"""


def modules_of(side_road: str) -> list[Path]:
    "The files of the package that its notebooks export."
    found = [
        module
        for path in chapters()
        if path.parent.name == side_road
        for text in texts(path, "code")
        for module in re.findall(r"^#\| default_exp (\S+)", text, re.M)
    ]
    return [Path(*module.split(".")).with_suffix(".py") for module in found]


def serve(folder: str, package: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SERVE, folder, str(package)],
        cwd=package,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_engine_serves_without_any_of_them(folder: str, tmp_path: Path) -> None:
    "The road alone; that it needs none of them singly follows from the rule of imports."
    shutil.copytree(ROOT / "teachvllm", tmp_path / "teachvllm")
    for side_road in SIDE_ROADS:
        modules = modules_of(side_road)
        assert modules
        for module in modules:
            (tmp_path / "teachvllm" / module).unlink()
    assert serve(folder, tmp_path) == serve(folder, ROOT)
