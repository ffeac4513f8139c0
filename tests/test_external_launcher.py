"""Under a real torchrun: every rank has an engine, and all say what one worker says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from teachvllm import LLM, BeamSearchParams, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = {"dtype": "float32", "skip_tokenizer_init": True, "device": "cpu", "swap_space": 0.001}
OPTIONS |= {"block_size": 8, "max_model_len": 96}
BLOCK = 2 * 3 * 8 * 32 * 4  # bytes: keys and values, layers, tokens, two KV heads of 16, float32

SCRIPT = """
    import json, os, sys
    sys.path.insert(0, sys.argv[1])
    from test_external_launcher import BLOCK, OPTIONS, answers
    from teachvllm import LLM, SamplingParams
    from teachvllm.executor.executor_base import EngineDeadError

    rank, said = int(os.environ["RANK"]), []
    if "init" in sys.argv:
        import torch.distributed
        torch.distributed.init_process_group("gloo")
    parallel = "pipeline_parallel_size" if "pipeline" in sys.argv else "tensor_parallel_size"
    options = OPTIONS | {"distributed_executor_backend": "external_launcher", parallel: 2}
    options |= {"async_scheduling": "init" in sys.argv}
    room = {"num_gpu_blocks_override": 12} if "pipeline" in sys.argv else {"kv_cache_memory_bytes": (12 + rank) * BLOCK // 2}
    with LLM(sys.argv[2], **room, **options) as llm:
        said.append(llm.llm_engine.engine_core.engine_core.scheduler.block_manager.num_gpu_blocks)
        said.append(answers(llm))
        for _ in range(2):
            try:
                llm.generate([[5, 6], [9 + rank]], SamplingParams(max_tokens=4), use_tqdm=False)
            except (ValueError, EngineDeadError) as error:
                said.append(f"{type(error).__name__}: {error}")
    with LLM(sys.argv[2], num_gpu_blocks_override=64, **options) as another:
        said.append(answers(another))
    sys.stdout.write(f"rank {rank} says {json.dumps(said)}\\n")  # in one write: both have the same pipe
"""


def answers(llm: LLM) -> list[list[int]]:
    "Tokens of greedy requests (more than fit), of forks and of beams."
    prompts = [[3 + i, *range(20, 24 + 5 * i)] for i in range(4)]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = [
        output.outputs[0].token_ids for output in llm.generate(prompts, greedy, use_tqdm=False)
    ]
    forks = llm.generate(
        prompts[0], SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True), use_tqdm=False
    )
    beams = llm.beam_search([prompts[1]], BeamSearchParams(beam_width=3, max_tokens=6))
    return found + [list(one.token_ids) for output in (*forks, *beams) for one in output.outputs]


def torchrun(folder: str, tmp_path: Path, *args: str) -> list[list]:
    "What the two ranks say."
    script = tmp_path / "script.py"
    script.write_text("\n".join(line[4:] for line in SCRIPT.splitlines()))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(script), str(ROOT / "tests"), folder, *args]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    return [json.loads(line.partition(" says ")[2]) for line in said]


@pytest.mark.parametrize("how", ["init", "pipeline"])
def test_all_ranks_say_what_one_worker_says(folder: str, tmp_path: Path, how: str) -> None:
    """On a small pool, with preemption, forks and beams, and again by a second engine in the same
    processes. "init": the script has a default group of its own, and the engines look ahead.
    Different prompts are told on each, and then the engines end. (A script without a group is
    chapter parallel/04's.)
    """
    with LLM(folder, num_gpu_blocks_override=12, **OPTIONS) as llm:
        small = answers(llm)
        assert llm.get_metrics()["num_preemptions"] > 0
    with LLM(folder, num_gpu_blocks_override=64, **OPTIONS) as llm:
        large = answers(llm)
    ranks = torchrun(folder, tmp_path, how)
    assert len(ranks) == 2 and ranks[0] == ranks[1]
    num_blocks, first, told, then, second = ranks[0]
    assert num_blocks == (
        6 if how == "pipeline" else 12
    )  # half for each batch in the pipeline; else rank 1 had room for 13
    assert (
        told.startswith("ValueError")
        and "different prompts" in told
        and then.startswith("EngineDeadError")
    )
    assert first == small and second == large


LAUNCHED = [(None, 2, "torchrun --nproc-per-node=2"), (2, 1, "is 1, but 2"), (3, 2, "is 2, but 3")]


@pytest.mark.parametrize("launched, size, says", LAUNCHED)
def test_no_launcher_or_another_size(
    folder: str, monkeypatch: pytest.MonkeyPatch, launched: int | None, size: int, says: str
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
        if launched:
            monkeypatch.setenv(name, str(launched) if name == "WORLD_SIZE" else "0")
    backend = "external_launcher"
    with pytest.raises(ValueError, match=says):
        LLM(
            folder,
            tensor_parallel_size=size,
            distributed_executor_backend=backend,
            num_gpu_blocks_override=64,
            **OPTIONS,
        )
