"""The package's shape: few classes, each one thing; who knows whom; and the way of a request
through all of them.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers import random_prompts

from teachvllm import LLM, EngineArgs, LLMEngine, SamplingParams
from teachvllm.attention.backend import AttentionBackend
from teachvllm.core.block_manager import AllocStatus
from teachvllm.core.orders import SchedulerOutput
from teachvllm.core.scheduler import Admission, Scheduler
from teachvllm.engine.core import EngineCore, InprocClient
from teachvllm.engine.output_processor import OutputProcessor
from teachvllm.executor.dummy_executor import DummyExecutor, make_requests, simulate
from teachvllm.executor.executor_base import ExecutorBase
from teachvllm.inputs import InputProcessor
from teachvllm.model_executor.models.llama import LlamaForCausalLM
from teachvllm.model_executor.sampler import Sampler
from teachvllm.sequence import SequenceGroup
from teachvllm.worker.model_runner import ModelRunner
from teachvllm.worker.worker import Worker

PACKAGE = Path(__file__).parents[1] / "teachvllm"
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


# Classes

EXTENDED_ONCE: dict[str, str] = {}  # base -> why there is one subclass, and the base is not made


@cache
def sources() -> dict[str, ast.Module]:
    "The package's modules by name, parsed."
    paths = [path for path in PACKAGE.rglob("*.py") if path.name != "_modidx.py"]
    names = {
        path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in paths
    }
    return {names[path].removesuffix(".__init__"): ast.parse(path.read_text()) for path in paths}


def class_defs() -> Iterator[ast.ClassDef]:
    for tree in sources().values():
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def name_of(node: ast.expr) -> str:
    "The last part of a name, of `a.b.C` as of `C` and `C[int]`."
    if isinstance(node, ast.Subscript):
        return name_of(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def package_bases() -> dict[str, list[str]]:
    "For each class of the package its bases that are classes of the package too."
    classes = {node.name: [name_of(base) for base in node.bases] for node in class_defs()}
    return {name: [base for base in bases if base in classes] for name, bases in classes.items()}


def names_used_as_values(node: ast.AST) -> Iterator[str]:
    """Names that are called, or handed on to be called: not those in annotations, in lists of bases
    and in `isinstance`.
    """
    if isinstance(node, ast.Name):
        yield node.id
    elif (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("teachvllm.")
    ):
        yield node.value.rpartition(".")[2]  # a qualified name
    skipped = {"annotation", "returns", "bases"}
    if isinstance(node, ast.Call) and name_of(node.func) in ("isinstance", "issubclass"):
        skipped = {"args"}
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if field not in skipped and isinstance(child, ast.AST):
                yield from names_used_as_values(child)


def test_no_class_is_never_made_and_extended_once() -> None:
    "Such a class and its only subclass are one thing, cut in two."
    made = {name for tree in sources().values() for name in names_used_as_values(tree)}
    children: dict[str, list[str]] = {}
    for name, bases in package_bases().items():
        for base in bases:
            children.setdefault(base, []).append(name)
    once = {base for base, names in children.items() if len(names) == 1 and base not in made}
    assert once <= set(EXTENDED_ONCE), {base: children[base] for base in once - set(EXTENDED_ONCE)}
    assert set(EXTENDED_ONCE) <= once and len(EXTENDED_ONCE) <= 2, (
        "an exception that is none any more"
    )


def test_no_line_of_inheritance_is_deeper_than_3() -> None:
    "A base, and two levels below it. Also, a class's name says which it is: no two have the same."
    names = [node.name for node in class_defs()]
    bases = package_bases()

    def depth(name: str) -> int:
        return 1 + max(map(depth, bases[name]), default=0)

    assert {name for name in bases if depth(name) > 3} == set()
    assert {name for name in names if names.count(name) > 1} == set()


# Modules

FRONT = (
    "llm",
    "engine.llm_engine",
    "engine.output_processor",
    "inputs",
    "outputs",
    "trace",
    "viz",
    "block_player",
)
BEHIND = ("core", "worker", "attention", "model_executor")  # folders


def imports(module: str) -> set[str]:
    """All modules of the package that `module` imports, at its top or in a function, as
    `teachvllm.a.b`.
    """
    found = set()
    package = module.rpartition(".")[0]
    for node in ast.walk(sources()[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            home = (
                ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
                if node.level
                else ""
            )
            where = ".".join(filter(None, (home, node.module)))
            found |= {where} | {f"{where}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "teachvllm"}


@pytest.mark.parametrize("module", FRONT)
def test_the_front_does_not_read_the_core(module: str) -> None:
    "It imports nothing from behind the messages, and reaches for no part of the core."
    name = f"teachvllm.{module}"
    assert {i for i in imports(name) if i.split(".")[1:2] and i.split(".")[1] in BEHIND} == set()
    parts = {"scheduler", "executor", "block_manager", "driver_worker", "worker", "model_runner"}
    read = {node.attr for node in ast.walk(sources()[name]) if isinstance(node, ast.Attribute)}
    assert read & parts == set()


def test_imports_are_found() -> None:
    assert {"teachvllm.engine.core", "teachvllm.messages"} <= imports("teachvllm.engine.llm_engine")
    assert {"teachvllm.core.orders", "teachvllm.worker.worker"} <= imports(
        "teachvllm.executor.executor_base"
    )


def test_the_core_and_the_front_import_no_torch(tmp_path: Path) -> None:
    """Not one module of `core/` does, nor the messages, nor what turns them into text; and a
    scheduler runs without it.
    """
    core = sorted(name for name in sources() if name.startswith("teachvllm.core."))
    front = [
        "messages",
        "sequence",
        "outputs",
        "inputs",
        "engine.output_processor",
        "trace",
        "viz",
        "block_player",
    ]
    code = f"""
import importlib, sys
for name in {core + [f"teachvllm.{name}" for name in front]}:
    importlib.import_module(name)
    assert not {{"torch", "transformers", "triton"}} & set(sys.modules), name

from teachvllm import SamplingParams
from teachvllm.messages import ModelRunnerOutput
from teachvllm.config import SchedulerConfig
from teachvllm.core.block_manager import BlockSpaceManager
from teachvllm.core.scheduler import Scheduler
from teachvllm.sequence import SequenceGroup

scheduler = Scheduler(SchedulerConfig(64), BlockSpaceManager(4, 8))
seq = scheduler.make_seq([1, 2, 3], seed=0, max_len=10)
scheduler.add_request(SequenceGroup("a", seq, SamplingParams()))
while scheduler.has_unfinished_requests():
    seq_ids = list(scheduler.schedule().num_scheduled_tokens)
    news = scheduler.update_from_output(ModelRunnerOutput(seq_ids, [[7]] * len(seq_ids)))
assert (seq.token_ids, news[0].finish_reason) == ([1, 2, 3] + [7] * 7, "length")
assert "torch" not in sys.modules
"""
    assert len(core) >= 5
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=PACKAGE.parent,
    )
    assert done.returncode == 0, done.stderr


# One scheduler, in the engine and in the simulator


class Alone(Admission):
    def can_admit(self, group: SequenceGroup, *freed: Any) -> AllocStatus:
        return AllocStatus.LATER if self.running else super().can_admit(group, *freed)


class OneAtATime(Scheduler):
    "A reader's answer to an exercise: no request is admitted while another one runs."

    admission_cls = Alone


class SmallSteps(Scheduler):
    "Another one: the engine's own steps, counted."

    num_steps = 0

    def schedule(self) -> SchedulerOutput:
        self.num_steps += 1
        return super().schedule()


def core_of(engine: LLMEngine) -> EngineCore:
    return engine.engine_core.engine_core


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_readers_scheduler_runs_in_the_engine(folder: str, asynchronous: bool) -> None:
    "It decides what runs together, and the answers are the same. A class, or its qualified name."
    options = {"dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 64}
    prompts = random_prompts(5)
    answers = []
    running = []
    for cls in (Scheduler, OneAtATime, f"{__name__}.SmallSteps"):
        with (
            LLM(folder, scheduler_cls=cls, async_scheduling=asynchronous, **options) as llm,
            llm.record() as trace,
        ):
            answers.append(
                [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
            )
            running.append(max(len(step.running) for step in trace.steps))
            last = core_of(llm.llm_engine).scheduler
    assert answers[0] == answers[1] == answers[2] and running == [5, 1, 5]
    assert type(last).__name__ == "SmallSteps" and last.num_steps == len(trace.steps)


def test_the_same_class_runs_in_the_simulator(folder: str) -> None:
    "Over a `DummyExecutor`: hundreds of requests, by a virtual clock."
    requests = make_requests(60, rate=2.0, max_len=128, vocab_size=100)
    running = []
    tokens = []
    for cls in (Scheduler, OneAtATime, SmallSteps):
        args = EngineArgs(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            num_gpu_blocks_override=200,
            scheduler_cls=cls,
            distributed_executor_backend=DummyExecutor,
            disable_log_stats=True,
        )
        engine = LLMEngine.from_engine_args(args)
        simulation = simulate(engine, requests)
        running.append(int(simulation.steps["running"].max()))
        tokens.append([result.num_output_tokens for result in simulation.results])
        assert type(core_of(engine).scheduler) is cls
        engine.close()
    assert tokens[0] == tokens[1] == tokens[2] and running[0] == running[2] > 5 and running[1] == 1


# The way of a request

PARTS = (
    LLM,
    LLMEngine,
    InputProcessor,
    OutputProcessor,
    InprocClient,
    EngineCore,
    Scheduler,
    ExecutorBase,
    Worker,
    ModelRunner,
    LlamaForCausalLM,
    AttentionBackend,
    Sampler,
)

THE_WAY = """
 LLM.generate
  LLMEngine.add_request
   InputProcessor.get_cache_salt
   InputProcessor.process
   InputProcessor.prepare
   OutputProcessor.add_request
   InprocClient.add_request
    EngineCore.add_request
     Scheduler.add_request
  LLMEngine.step
   InprocClient.get_output
    EngineCore.step
     Scheduler.queue_ready_requests
     Scheduler.schedule
     ExecutorBase.submit
      Worker.submit
       ModelRunner.execute_model
        AttentionBackend.build
        LlamaForCausalLM.forward
         AttentionBackend.do_kv_cache_update
         AttentionBackend.forward
        LlamaForCausalLM.compute_logits
        Sampler.__call__
     ExecutorBase.collect
      Worker.collect
     Scheduler.update_from_output
   OutputProcessor.process_outputs
"""
ASIDE = {"has_unfinished_requests", "make_seq"}  # looks at a part, or gets an id from it


class Walk:
    """While it is profiled, the calls from one part into another, indented by how deep they are:
    `lines`.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.stack: list[type | None] = [None]  # the part that each frame works for
        self.depth = 0

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            code = frame.f_code
            caller = self.stack[-1]
            is_method = code.co_argcount and code.co_varnames[0] == "self"
            me = frame.f_locals.get("self") if is_method else None
            part = next((part for part in PARTS if isinstance(me, part)), caller)
            self.depth += part is not caller
            # torch's `Module.__call__`
            method = {"_wrapped_call_impl": "forward"}.get(code.co_name, code.co_name)
            if part is not None and part is not caller and method not in ASIDE:
                self.lines.append(" " * self.depth + f"{part.__name__}.{method}")
            self.stack.append(part)
        elif event == "return" and len(self.stack) > 1:
            part = self.stack.pop()
            self.depth -= part is not self.stack[-1]


def test_the_way_of_a_request(folder: str) -> None:
    """From `LLM.generate` to the attention kernel, and back to a `RequestOutput`: each part is
    entered where it should be, by the part that has it, and by no other; with one request and one
    step each call happens once; in the model, once a layer, but layers of a kind share a plan.
    """
    options = {"dtype": "float32", "skip_tokenizer_init": True, "num_gpu_blocks_override": 64}
    with LLM(folder, async_scheduling=False, **options) as llm:
        num_layers = llm.llm_engine.config.model_config.num_layers
        walk = Walk()
        sys.setprofile(walk)
        try:
            output = llm.generate(
                [5, 6, 7], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False
            )[0]
        finally:
            sys.setprofile(None)
    layer = [line for line in walk.lines if "AttentionBackend" in line]
    assert [line.strip() for line in layer] == ["AttentionBackend.build"] + [
        "AttentionBackend.do_kv_cache_update",
        "AttentionBackend.forward",
    ] * num_layers
    assert list(dict.fromkeys(walk.lines)) == THE_WAY.strip("\n").split("\n")
    assert [line for line in walk.lines if walk.lines.count(line) > 1] == layer[1:]
    assert output.finished and len(output.outputs[0].token_ids) == 1
