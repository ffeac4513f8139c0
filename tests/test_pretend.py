"""The pretended card: that it refuses what a GPU refuses, and that an engine runs on it in each of its settings."""

import os
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import on_a_card
import pytest
import torch
from helpers import answers_on_card, on_card
from tiny_eyes import PLACEHOLDERS
from torch.nn import functional as F

from teachvllm import pretend
from teachvllm.pretend_device import GPU
from tools.chapters import name_of, notebooks

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is in the way")


@pytest.fixture
def gpu() -> Iterator[GPU]:
    with torch.inference_mode():
        yield pretend.install("T4", count=2)
    pretend.uninstall()


def kinds(gpu: GPU, run: Any) -> list[str]:
    "What the card is asked for meanwhile."
    start = len(gpu.log)
    run()
    return [f"{h.kind} {h.name}" for h in gpu.log[start:]]


def test_nothing_is_left_behind() -> None:
    names = [
        (torch, "empty"),
        (torch, "Generator"),
        (torch.cuda, "Stream"),
        (torch.cuda, "is_available"),
    ]
    before = [getattr(owner, name) for owner, name in names]
    pretend.install("H100")
    assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    with pytest.raises(RuntimeError, match="already"):
        pretend.install("T4")
    pretend.uninstall()
    assert [getattr(owner, name) for owner, name in names] == before
    assert not torch.cuda.is_available() and "data" not in vars(torch.Tensor)
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
        torch.empty(1, device="cuda")
    with pytest.raises(ValueError, match="choose one of T4"):
        pretend.install("RTX")
    with pytest.raises(ValueError, match="forms='no_forms': Python finds no such module"):
        pretend.install("T4", forms="no_forms")
    assert not torch.cuda.is_available()


def test_results_are_those_of_the_host(gpu: GPU) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 6), torch.randn(5, 6)
    a, b = x.to("cuda"), w.to("cuda")
    pairs = [
        (F.linear(x, w), F.linear(a, b)),
        (x[:, 2:4].t().reshape(-1), a[:, 2:4].t().reshape(-1)),
        (x.softmax(-1).topk(2)[1], a.softmax(-1).topk(2)[1]),
        (F.layer_norm(x, (6,)).half(), F.layer_norm(a, (6,)).half()),
        (torch.cat([x, x]).cumsum(0), torch.cat([a, a]).cumsum(0)),
        (x[0] @ w.t(), a[0] @ b.t()),  # torch squeezes its result in place
        (x.clone().unsqueeze_(0).transpose_(1, 2), a.clone().unsqueeze_(0).transpose_(1, 2)),
        (x.masked_fill(x > 0, 1.0), a.masked_fill(a > 0, 1.0)),
        (torch.arange(5) * 2.5, torch.arange(5, device="cuda") * 2.5),
        (
            F.scaled_dot_product_attention(*[x.view(1, 2, 2, 6)] * 3),
            F.scaled_dot_product_attention(*[a.view(1, 2, 2, 6)] * 3),
        ),
    ]
    for expected, found in pairs:
        assert found.is_cuda and torch.allclose(found.cpu(), expected)
    drawn = torch.empty(3, device="cuda").uniform_(generator=torch.Generator("cuda").manual_seed(1))
    assert drawn.tolist() == torch.rand(3, generator=torch.manual_seed(1)).tolist()
    state = torch.cuda.get_rng_state()
    once = torch.rand(3, device="cuda").tolist()
    torch.cuda.set_rng_state(state)
    assert torch.rand(3, device="cuda").tolist() == once
    assert f"{a[0, 0]:.3f}" == f"{x[0, 0]:.3f}"
    a[1:3, 0] = 7
    assert a.tolist()[2][0] == 7 and a[1:3].view(-1).shape == (12,)


def test_modules_move_and_copy(gpu: GPU) -> None:
    linear = torch.nn.Linear(3, 2).to("cuda")
    assert linear.weight.is_cuda and isinstance(linear.weight, torch.nn.Parameter)
    assert torch.equal(linear.cpu().weight, linear.weight.cpu())
    with torch.device("cuda"):
        assert torch.nn.Linear(3, 2).weight.is_cuda and torch.tensor(1).is_cuda
    assert torch.zeros(2).to("cuda:1").device.index == 1
    with torch.cuda.device(1), torch.device("cuda"):
        made = [torch.ones(2), torch.tensor([1]), torch.ones(2, device="cpu").to("cuda")]
    assert [x.device.index for x in made] == [1, 1, 1]


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_parameters_move_and_change_their_memory(gpu: GPU, inference: bool, grad: bool) -> None:
    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        embedding = torch.nn.Embedding(4, 2).to("cuda", torch.float16)  # the dtype as well
        weight = embedding.weight
        assert embedding(torch.tensor([3], device="cuda")).tolist() == weight[3:].tolist()
        assert weight.data.tolist() == weight.tolist() and not weight.data.requires_grad
        other = torch.full((3, 2), 5.0, device="cuda")
        weight.rows = other.tolist  # a tied head leaves such a mark
        weight.data = other
        assert weight.rows() == [[5, 5]] * 3
        assert embedding.weight is weight and isinstance(weight, torch.nn.Parameter)
        assert embedding(torch.tensor([2], device="cuda")).tolist() == [[5, 5]]
        other[2] = 6
        assert weight.shape == (3, 2) and weight[2].tolist() == [6, 6]


@pytest.mark.parametrize("inference", [True, False])
def test_a_tied_parameter_stays_one_through_every_move(gpu: GPU, inference: bool) -> None:
    with torch.inference_mode(inference):
        model = torch.nn.ModuleList([torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4, bias=False)])
        weight = model[1].weight = model[0].weight
        weight.mark = "a packed head's"
        numbers = weight.tolist()
        for device in ("cuda", "cpu", "cuda:1", "cuda:0"):
            model.to(device)
            assert model[0].weight is weight is model[1].weight and weight.tolist() == numbers
            assert weight.device == torch.device("cuda:0" if device == "cuda" else device)
            assert isinstance(weight, torch.nn.Parameter)
            assert weight.mark == "a packed head's" and ("host" in vars(weight)) == weight.is_cuda
        weight.data = weight.new_empty(0)  # as a packed head leaves it
        assert not model.to("cpu")[0].weight.numel() and not weight.is_cuda


def test_gradients_and_views_move_with_a_parameter(gpu: GPU) -> None:
    with torch.inference_mode(False):
        linear = torch.nn.Linear(2, 3)
        kept, known = linear.weight[1:], weakref.ref(linear.weight)
        linear(torch.ones(1, 2)).sum().backward()
        for device in ("cuda", "cpu"):
            linear.to(device)
            assert linear.weight.grad.tolist() == [[1, 1]] * 3 and known() is linear.weight
            assert linear.weight.grad.device.type == device and linear.weight.requires_grad
        assert kept.tolist() == linear.weight[1:].tolist()


@pytest.mark.parametrize(
    "wrong, says",
    [
        (lambda: torch.ones(2, device="cuda") + torch.ones(2), "cuda:0 and cpu"),
        (lambda: torch.ones(2, 2) @ torch.ones(2, 2, device="cuda"), "two devices"),
        (
            lambda: torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1"),
            "cuda:0 and cuda:1",
        ),
        (lambda: torch.ones(2, device="cuda").numpy(), "can't convert cuda:0"),
        (
            lambda: torch.randn(2, device="cuda", generator=torch.Generator()),
            "for generator but found",
        ),
        (lambda: torch.empty(1 << 34, device="cuda"), "out of memory"),
        (lambda: torch.empty(1, device="cuda:2"), "invalid device ordinal"),
    ],
)
def test_refused(gpu: GPU, wrong: Any, says: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=says):
        wrong()
    assert torch.ones(2, device="cuda").sum().item() == 2  # and it goes on


def test_what_waits(gpu: GPU) -> None:
    x = torch.arange(4.0, device="cuda")
    mask, rows = x > 1, torch.tensor([1, 2], device="cuda")
    assert kinds(gpu, lambda: x[rows] + 1) == ["launch index.Tensor", "launch add.Tensor"]
    assert kinds(gpu, lambda: x.view(2, 2)[:1].T) == []
    assert kinds(gpu, lambda: torch.empty_like(x)) == []
    assert kinds(gpu, lambda: x.masked_fill_(mask, 0)) == ["launch masked_fill_.Scalar"]
    assert kinds(gpu, lambda: x.__setitem__(mask, 1.0)) == ["launch index_put_"]
    for waiting in (
        lambda: x[mask],
        lambda: x[[0, 1]],
        lambda: x.nonzero(),
        lambda: x.tolist(),
        lambda: bool(x.any()),
        lambda: torch.tensor([1]).to("cuda"),
        lambda: x.unique(),
        lambda: x.__setitem__(rows, 1.0),
    ):
        assert any(line.startswith("wait") for line in kinds(gpu, waiting)), waiting
    pinned = torch.zeros(4, pin_memory=True)
    assert kinds(gpu, lambda: pinned.to("cuda", non_blocking=True)) == ["copy to the GPU"]
    assert kinds(gpu, lambda: x.to("cpu", non_blocking=True)) == ["copy to the host"]
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing"):
        x.sum().item()
    torch.cuda.set_sync_debug_mode("default")


def test_memory(gpu: GPU) -> None:
    free, total = torch.cuda.mem_get_info()
    x = torch.empty(1 << 20, device="cuda")
    assert x.isnan().all() and (torch.empty(3, dtype=torch.int32, device="cuda") == -1).all()
    assert torch.cuda.memory_allocated() == 4 << 20 and torch.cuda.memory_allocated(1) == 0
    view = x[5:]
    del x
    assert torch.cuda.memory_allocated() == 4 << 20
    del view
    assert torch.cuda.memory_allocated() == 0 and torch.cuda.max_memory_allocated() >= 4 << 20
    assert torch.cuda.mem_get_info() != (free, total)
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info() == (free, total)
    large = torch.zeros(1 << 32, dtype=torch.uint8, device="cuda")  # the host takes none of it
    assert large[1 << 31].item() == 0 and large[-1].item() == 0
    large[7] = 3
    assert large.zero_()[7].item() == 0


def test_late_copies(gpu: GPU) -> None:
    x = torch.arange(3.0, device="cuda")
    late = x.to("cpu", non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    x += 1
    later = x.to("cpu", non_blocking=True)
    assert late.isnan().all() and late.is_pinned()
    event.synchronize()
    assert late.tolist() == [0, 1, 2] and later.isnan().all()
    torch.cuda.synchronize()
    assert later.tolist() == [1, 2, 3]
    out = x.to("cpu", non_blocking=True)  # and in again, in the order of the stream
    assert out.isnan().all() and out.to("cuda", non_blocking=True).tolist() == [1, 2, 3]
    slow = x.to("cpu", non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    assert not event.query() and slow.isnan().all() and event.query() and slow[0] == 1
    side = torch.cuda.Stream()
    slow = x.to("cpu", non_blocking=True)
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match="pinned memory still"):
        slow.to("cuda", non_blocking=True)


def test_races(gpu: GPU) -> None:
    pinned = torch.zeros(4, pin_memory=True)
    pinned.to("cuda", non_blocking=True)
    pinned += 1
    with pytest.raises(RuntimeError, match="pinned memory was written"):
        torch.cuda.synchronize()

    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match="stream \\d+ reads"):
        x + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    with pytest.raises(RuntimeError, match="stream 0 writes"):
        x += 1
    x + 1  # two may read
    side.record_event().wait()
    x += 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y += x
    del x
    with pytest.raises(RuntimeError, match="was freed while stream"):
        torch.ones(1, device="cuda")
    assert y.is_cuda
    z = torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y += z
    z.record_stream(side)
    with pytest.raises(RuntimeError, match="stream 0 writes"):
        z += 1
    del z  # the allocator waits for the stream that was named
    assert torch.zeros(1).to("cuda").item() == 0


def test_graphs(gpu: GPU) -> None:
    x = torch.ones(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="without a preceding"):
        graph.replay()
    with torch.cuda.graph(graph):
        y = x * 2
        x += 1
    assert x.tolist() == [1, 1, 1] and y.isnan().all()
    assert kinds(gpu, graph.replay) == ["replay 2 launches"]
    assert x.tolist() == [2, 2, 2] and y.tolist() == [2, 2, 2]
    graph.replay()
    assert y.tolist() == [4, 4, 4]
    graph.replay()
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError, match="a race"):
        y + 1
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second):
        numbers = torch.arange(2, device="cuda")
        numbers += 1
    second.replay()
    second.replay()
    assert numbers.tolist() == [1, 2]
    old = torch.cuda.Event()
    old.record()
    for refused in (
        lambda: x.sum().item(),
        lambda: x.nonzero(),
        lambda: torch.tensor([1.0]).to("cuda"),
        torch.cuda.synchronize,
        graph.replay,
        old.wait,
    ):
        with pytest.raises(RuntimeError, match="stream is capturing"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                refused()
        assert gpu.capture is None


def test_streams_of_a_capture(gpu: GPU) -> None:
    "Others than its own take part once they wait for it, and must be waited for."
    x = torch.ones(3, device="cuda")
    side = torch.cuda.Stream()

    def capture(fork: bool, join: bool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            own = torch.cuda.current_stream()
            x.add_(1)
            if fork:
                side.wait_stream(own)
            with torch.cuda.stream(side):
                x.mul_(2)
            if join:
                own.wait_stream(side)
            x.add_(1)
        return graph

    with pytest.raises(RuntimeError, match="takes no part in the capture"):
        capture(fork=False, join=False)
    with pytest.raises(RuntimeError, match="unjoined work"):
        capture(fork=True, join=False)
    capture(fork=True, join=True).replay()
    torch.cuda.synchronize()
    assert x.tolist() == [5, 5, 5]
    try:
        raise ValueError("handled elsewhere")
    except ValueError:
        capture(fork=True, join=True).replay()
    with pytest.raises(RuntimeError, match="previous error during capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            with pytest.raises(RuntimeError, match="stream is capturing"):
                x.sum().item()


@pytest.fixture(scope="module")
def settings() -> dict[tuple[str, str], str]:
    "What went wrong in each setting: the engine in all of them on an H100, in the most used on a T4."
    found = {}
    for card, names in {"H100": [], "T4": on_a_card.ON_EACH_CARD}.items():
        answers = answers_on_card(card, "on_a_card.py", *names, count=2)
        found |= {(card, name): wrong for name, wrong in answers.items()}
    return found


CASES = [("H100", name) for name in on_a_card.SETTINGS] + [
    ("T4", n) for n in on_a_card.ON_EACH_CARD
]


@pytest.mark.parametrize("card, name", CASES)
def test_engine(settings: dict[tuple[str, str], str], card: str, name: str) -> None:
    wrong = settings[card, name]
    if (card, name) == ("T4", "8-bit cache"):
        assert "kv_cache_dtype=fp8_e4m3 needs compute capability 8.9" in wrong
        assert "this GPU has 7.5: try fp8_e5m2" in wrong
    else:
        assert not wrong, wrong


@pytest.mark.parametrize(
    "card, family",
    [
        ("T4", "qwen2_vl"),
        *(
            pytest.param(card, family, marks=pytest.mark.slow)
            for card, family in product(("T4", "H100"), PLACEHOLDERS)
            if (card, family) != ("T4", "qwen2_vl")
        ),
    ],
)
def test_models_that_see(card: str, family: str) -> None:
    "Images are copied from pinned memory, and encoded without a wait."
    assert answers_on_card(card, "eyes_on_a_card.py", family) == {family: ""}


def test_tests_marked_gpu() -> None:
    "But for three, which take the interpreter minutes; the settings above have the last one."
    files = [f"tests/test_{name}.py" for name in ("cuda_graph", "config", "mixed_graphs", "swaps")]
    few = "not failed_replay and not memory_of_graphs and not replay_equals_eager"
    which = ["-m", "gpu", "-k", few, *files]
    done = on_card("T4", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *which)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]


def test_forms_of_torch() -> None:
    "What they leave in memory is what Triton's interpreter leaves there."
    answers = answers_on_card("H100", "forms_on_a_card.py")
    assert len(answers) == 9 and answers == dict.fromkeys(answers, "")


# of those that launch kernels of their own or serve, what takes seconds
OFTEN = [("T4", "23_triton_utils"), ("H100", "23_triton_utils"), ("T4", "41_model_runner")]
OWN_CARD = ("gpu/04", "gpu/05", "gpu/06", "gpu/09")  # they pretend one themselves
SERVES = re.compile(r"cuda\.is_available\(|\bLLM\(")


def chapters() -> list[Any]:
    "Those that take a GPU where there is one, on each card; most only with --slow, in hours."
    found = []
    for notebook, card in product(notebooks(), ("T4", "H100")):
        name = name_of(notebook)
        if name.startswith(OWN_CARD) or not SERVES.search(notebook.read_text(encoding="utf-8")):
            continue
        marks = () if (card, name) in OFTEN else pytest.mark.slow
        found.append(pytest.param(card, name, marks=marks, id=f"{card}-{name}"))
    return found


@pytest.mark.timeout(3800)
@pytest.mark.parametrize("card, name", chapters())
def test_chapter(card: str, name: str) -> None:
    "All its cells, those of a GPU as well. Only some kernels go through Triton's interpreter."
    run = [sys.executable, "tools/notebooks.py", "--check", "--flags", "gpu", name]
    options: dict[str, Any] = {"forms": "torch_forms", "seconds": 3700, "TEACHVLLM_QUICK": "1"}
    done = on_card(card, *run, "--timeout", "3600", **options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def test_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # real ones are hidden: one was asked for
    code = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_name())"
    pretend_cards = [sys.executable, "-m", "teachvllm.pretend", "--count", "2", "T4"]
    run = partial(subprocess.run, capture_output=True, text=True, cwd=ROOT)
    done = run([*pretend_cards, sys.executable, "-c", code])
    assert done.stdout.strip() == "2 Tesla T4", done.stderr
    hide = "import os; os.environ['CUDA_VISIBLE_DEVICES'] = ''; "
    hidden = on_card("T4", sys.executable, "-c", hide + code.split(",")[0] + ")")
    assert hidden.stdout.strip() == "0", hidden.stderr
    code = f"import os; os._exit({os.EX_CONFIG})"
    assert run([*pretend_cards, sys.executable, "-c", code]).returncode == os.EX_CONFIG
