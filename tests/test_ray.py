"""Workers that are actors of a real Ray, on two nodes of this machine: tokens, places and faults.
Nothing is left behind.
"""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_worker import SOON, is_alive, make_config, make_worker_cls, wait_until
from test_external_launcher import answers

from teachvllm import LLM, SamplingParams
from teachvllm.executor.executor_base import EngineDeadError
from teachvllm.executor.ray_executor import RayDistributedExecutor

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ray = pytest.importorskip("ray", reason='Ray is not installed: pip install "teachvllm[ray]"')
ROOT = Path(__file__).resolve().parents[1]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "device": "cpu",
    "swap_space": 0.001,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    "Two nodes with three CPUs each; this process is on the first."
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    for _ in range(2):
        nodes.add_node(num_cpus=3)
    ray.init(nodes.address, log_to_driver=False, logging_level="error")
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(scope="module")
def shared(cluster: Any) -> Iterator[RayDistributedExecutor]:
    "Two workers for all tests that leave them alive."
    executor = RayDistributedExecutor(make_config())
    yield executor
    assert not executor.dead, "a test has killed them"
    executor.shutdown()


def check_gone(executor: RayDistributedExecutor) -> None:
    "Its processes have ended, and its CPUs are free; two are held by the shared one."
    wait_until(lambda: not any(is_alive(pid) for _, _, pid, _ in executor.places))
    wait_until(lambda: ray.available_resources().get("CPU", 0) == 4)
    assert ray.is_initialized()


# Calls


def test_calls(shared: RayDistributedExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared.execute_model(1) == (0, 1)
    assert shared.collective_rpc(
        lambda worker, a, b: worker.rank + a + b, args=(10,), kwargs={"b": 5}
    ) == [15, 16]
    assert shared.collective_rpc("execute_model", args=(2,)) == [(0, 2), (1, 2)]
    for step in (1, 2, 3):
        shared.submit(step)
    shared.drain()
    assert not shared.in_flight and shared.execute_model(4) == (0, 4)
    shared.reset()
    assert shared.collective_rpc(lambda worker: worker.steps) == [[], []]
    with pytest.raises(ValueError, match="no method 'make_coffee'"):
        shared.collective_rpc("make_coffee")


def test_errors_of_any_worker(shared: RayDistributedExecutor) -> None:
    "are raised, with that worker's traceback, though another one answers; and the engine goes on."
    for rank in (0, 1):
        with pytest.raises(LookupError, match="^.raise A.$|^raise A$") as failed:
            shared.execute_model({rank: "raise A"})
        assert f"worker rank={rank}" in str(failed.value.__cause__) and "in _act" in str(
            failed.value.__cause__
        )
        shared.reset()
    with pytest.raises(TypeError, match="pickle"):
        shared.collective_rpc(lambda worker: __import__("threading").Lock())
    assert shared.execute_model(1) == (0, 1)


def test_a_timeout_names_the_ranks(shared: RayDistributedExecutor, tmp_path: Path) -> None:
    "The answer is dropped when it comes."
    go = tmp_path / "go"
    with pytest.raises(TimeoutError, match=r"no answer from worker rank=(0, )?1 after 3 s"):
        shared.collective_rpc("execute_model", timeout=3.0, args=({1: f"wait {go}"},))
    go.touch()
    assert shared.execute_model(5) == (0, 5)


def test_ctrl_c_leaves_the_step_in_flight(shared: RayDistributedExecutor, tmp_path: Path) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    go = tmp_path / "go"
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        shared.submit({0: f"wait {go}"})
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            shared.collect()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    go.touch()
    assert shared.collect() == (0, {0: f"wait {go}"})


def test_a_step_on_a_gpu_is_launched_before_the_one_before_is_fetched(
    shared: RayDistributedExecutor,
) -> None:
    "There a step is two orders. An error when it is launched is raised when it is fetched."
    shared.is_ahead = True
    try:
        shared.reset()
        for step in (1, 2):
            shared.submit(step)
        assert shared.collective_rpc(lambda worker: list(worker.steps)) == [[1, 2]] * 2
        assert [shared.collect(), shared.collect()] == [(0, 1), (0, 2)]
        shared.submit({1: "raise B"})
        with pytest.raises(LookupError, match="raise B"):
            shared.collect()
        shared.reset()
        assert shared.execute_model(3) == (0, 3)
    finally:
        shared.is_ahead = False


# Places


def test_ranks_are_counted_node_by_node(
    shared: RayDistributedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process's node first; the environment is this process's; the workers meet where all
    reach it.
    """
    passed = [
        "TEACHVLLM_TEST",
        "VLLM_TORCH_PROFILER_DIR",
        "HF_TEST",
        "NCCL_DEBUG",
        "GLOO_SOCKET_IFNAME",
        "CUDA_LAUNCH_BLOCKING",
    ]
    kept = ["CUDA_HOME", "CUDA_VISIBLE_DEVICES", "PATH_OF_THIS_MACHINE"]
    for name in [*passed, *kept]:
        monkeypatch.setenv(name, "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    executor = RayDistributedExecutor(make_config(4, tp_size=2))
    here = ray.get_runtime_context().get_node_id()
    nodes = [place[0] for place in executor.places]
    num_here = nodes.count(here)
    assert num_here in (1, 3) and nodes == [here] * num_here + [nodes[-1]] * (
        4 - num_here
    )  # the shared one fills a node
    known = executor.collective_rpc(
        lambda worker: (worker.rank, worker.local_rank, worker.is_driver_worker)
    )
    local_ranks = [*range(num_here), *range(4 - num_here)]
    assert known == list(zip(range(4), local_ranks, (True, False, True, False)))
    env = executor.collective_rpc(
        lambda worker: [os.environ.get(name) for name in [*passed, "OMP_NUM_THREADS", *kept]]
    )
    assert [values[: len(passed) + 1] for values in env] == [["lo"] * len(passed) + ["2"]] * 4
    assert all("lo" not in values[len(passed) + 1 :] for values in env)
    address = f"tcp://{ray.util.get_node_ip_address()}:"
    assert all(
        url.startswith(address)
        for url in executor.collective_rpc(lambda worker: worker.init_method)
    )
    assert executor.execute_model(1) == (2, 1)  # the first rank of the last stage answers
    executor.shutdown()
    executor.shutdown()
    check_gone(executor)
    with pytest.raises(ValueError, match="closed"):
        executor.collective_rpc("reset")


def test_a_cluster_that_is_too_small(
    shared: RayDistributedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once if it can never be; after a while if others hold what is asked for; and Ray may have
    no GPU at all.
    """
    monkeypatch.setattr(RayDistributedExecutor, "place_timeout", 1)
    with pytest.raises(
        ValueError, match=r"= 7 needs 7 CPUs, and Ray has [13] of 3 free on .*, [13] of 3 free on"
    ):
        RayDistributedExecutor(make_config(7))
    with pytest.raises(
        ValueError, match=r"= 5 needs 5 CPUs.*ray start --address.*ray.init\(num_cpus=5\)"
    ):
        RayDistributedExecutor(make_config(5))
    config = make_config(1)
    config.device_config.device = "cuda"
    with pytest.raises(ValueError, match="needs 1 GPUs, and Ray has 0 of 0 free"):
        RayDistributedExecutor(config)
    states = [group["state"] for group in ray.util.placement_group_table().values()]
    assert states.count("CREATED") == 1 and shared.execute_model(1) == (0, 1)


def test_inside_a_placement_group(shared: RayDistributedExecutor) -> None:
    "An actor that was given one has its workers there; they are all that ends with the executor."
    config = make_config(2)
    bigger = make_config(3)
    config.parallel_config.worker_cls = bigger.parallel_config.worker_cls = make_worker_cls()

    @ray.remote(num_cpus=0)
    def run() -> tuple:
        with pytest.raises(
            ValueError, match="= 3 needs 3 bundles, the current placement group has 2 with a CPU"
        ):
            RayDistributedExecutor(bigger)
        executor = RayDistributedExecutor(config)
        answer = executor.execute_model(1)
        nodes = [place[0] for place in executor.places]
        executor.shutdown()
        return answer, nodes

    group = ray.util.placement_group([{"CPU": 1}] * 2, strategy="STRICT_PACK")
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    answer, nodes = ray.get(run.options(scheduling_strategy=strategy).remote(), timeout=SOON)
    table = ray.util.placement_group_table(group)
    assert (
        answer == (0, 1)
        and nodes == [table["bundles_to_node_id"][0]] * 2
        and table["state"] == "CREATED"
    )
    ray.util.remove_placement_group(group)


# Faults


def check_dead(executor: RayDistributedExecutor, says: str) -> None:
    "Every call says why; nothing is left."
    for call in (
        lambda: executor.submit(1),
        lambda: executor.collective_rpc("reset"),
        executor.reset,
    ):
        with pytest.raises(EngineDeadError, match=says):
            call()
    check_gone(executor)
    executor.shutdown()


def test_killed_in_a_step(shared: RayDistributedExecutor) -> None:
    "Also if the other one waits for it: every waiting call and every later one says so."
    executor = RayDistributedExecutor(make_config())
    executor.submit(1)
    assert executor.collect() == (0, 1)
    executor.submit({0: "hang", 1: "kill"})
    executor.submit(3)
    pid = executor.places[1][2]
    for _ in range(2):
        with pytest.raises(
            EngineDeadError,
            match=rf"worker rank=1 \(process {pid} on .*\) died: .*process has died",
        ):
            executor.collect()
    check_dead(executor, "rank=1")


def test_an_error_that_echoes_a_death(
    shared: RayDistributedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    "The death is told."
    monkeypatch.setattr(RayDistributedExecutor, "grace", SOON)  # it may come long after the echo
    executor = RayDistributedExecutor(make_config())
    with pytest.raises(EngineDeadError, match="worker rank=1 .* died"):
        executor.execute_model({0: "raise lost the connection", 1: "kill"})
    check_dead(executor, "rank=1")


def test_hangs_after_another_one_failed(
    shared: RayDistributedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    "It waits for the one that failed, so it cannot be reset. The first failure is told."
    monkeypatch.setattr(RayDistributedExecutor, "reset_timeout", 0.5)
    monkeypatch.setattr(RayDistributedExecutor, "grace", 0.2)
    executor = RayDistributedExecutor(make_config())
    with pytest.raises(LookupError, match="raise F"):
        executor.execute_model({0: "hang", 1: "raise F"})
    with pytest.raises(
        EngineDeadError, match="could not be reset .*rank=0.*before that, LookupError.*raise F"
    ):
        executor.reset()
    check_dead(executor, "raise F")


def test_faults_while_it_starts(
    shared: RayDistributedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's own error, also if the other one hangs; its death; or the time is up. Nothing is
    left.
    """
    monkeypatch.setattr(RayDistributedExecutor, "grace", 0.2)
    with pytest.raises(LookupError, match="raise no memory"):
        RayDistributedExecutor(
            make_config(faults={("load_model", 1): "raise no memory", ("load_model", 0): "hang"})
        )
    with pytest.raises(EngineDeadError, match="worker rank=0 .* died"):
        RayDistributedExecutor(make_config(1, faults={("init_device", 0): "kill"}))
    monkeypatch.setattr(RayDistributedExecutor, "start_timeout", 0.01)
    with pytest.raises(
        TimeoutError, match="get_place: no answer from worker rank=0, 1 after 0.01 s"
    ):
        RayDistributedExecutor(make_config())
    wait_until(lambda: ray.available_resources().get("CPU", 0) == 4)


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install .teachvllm\[ray\]"):
        RayDistributedExecutor(make_config())


# With a model


def test_the_tokens_of_one_worker(folder: str, shared: RayDistributedExecutor) -> None:
    "On a small pool, with preemption, forks and beams; four workers are two stages."
    small = {"num_gpu_blocks_override": 12, "block_size": 8, "max_model_len": 96, **OPTIONS}
    with LLM(folder, **small) as llm:
        expected = answers(llm)
        assert llm.get_metrics()["num_preemptions"] > 0
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    with LLM(folder, distributed_executor_backend="ray", **small, **sizes) as llm:
        assert answers(llm) == answers(llm) == expected
        # all fail alike
        llm.collective_rpc(lambda worker: setattr(worker, "submit", lambda out: 1 / 0))
        with pytest.raises(ZeroDivisionError):
            answers(llm)
        llm.collective_rpc(lambda worker: delattr(worker, "submit"))
        llm.generate([[5]], SamplingParams(max_tokens=1), use_tqdm=False)
        executor = llm.llm_engine.engine_core.engine_core.executor
        executor.grace = 10.0  # Ray may tell of a death long after its echo
        os.kill(executor.places[-1][2], signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="worker rank=3 .* died"):
                llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4), use_tqdm=False)
    check_gone(executor)


# A Ray that was not there

SCRIPT = """
    import os, subprocess, sys, time
    sys.path.insert(0, sys.argv[1])
    from test_ray import RayDistributedExecutor, command, make_config, ray

    def pids():
        return {pid: parent for pid, parent in (map(int, line.split()) for line in os.popen("ps -eo pid=,ppid=").readlines())}

    def mine():
        parents, found = pids(), {os.getpid()}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return {pid for pid in found - {os.getpid()} if os.path.exists(f"/proc/{pid}")}

    alone = RayDistributedExecutor(make_config(1))
    alone.shutdown()
    assert not ray.is_initialized() and "ray" not in "".join(map(command, mine()))
    first = RayDistributedExecutor(make_config(1))
    second = RayDistributedExecutor(make_config(1))
    first.shutdown()
    assert second.execute_model(1) == (0, 1)  # it is in the Ray that the first one began
    print(*mine(), flush=True)
    time.sleep(600)
"""


def test_ray_begins_and_ends_with_the_executor(tmp_path: Path) -> None:
    """Where there is none. It listens on the loopback only, and goes on for a second executor. When
    the script is killed, no worker is left (two agents of Ray's own go on for a minute, in which
    they look for what is gone).
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    env = {
        **os.environ,
        "RAY_ADDRESS": "local",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    argv = [sys.executable, str(path), str(ROOT / "tests")]
    script = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env)
    assert script.stdout
    pids = [int(pid) for pid in script.stdout.readline().split() if is_alive(int(pid))]
    assert len(pids) >= 3 and not listening_beyond_the_loopback(pids)
    pids = [pid for pid in pids if "Agent" not in command(pid)]
    script.kill()
    assert script.wait(SOON) == -signal.SIGKILL
    script.stdout.close()
    wait_until(lambda: not any(map(is_alive, pids)))


def command(pid: int) -> str:
    "The command line of a process; empty if it has ended."
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def listening_beyond_the_loopback(pids: list[int]) -> list[str]:
    """Addresses (hexadecimal) at which these processes wait for connections, other than 127.0.0.1
    and ::1.
    """
    sockets: set[str] = set()
    for pid in pids:
        try:
            sockets |= {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:
            continue
    rows = [
        row.split()
        for kind in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    found = [
        row[1].partition(":")[0]
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in sockets
    ]
    assert found
    return [address for address in found if not address.endswith(("0100007F", "01000000"))]
