"""Arguments on their way in: every name of vLLM's is known, no CUDA starts, and a busy machine is
mentioned.
"""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from teachvllm import arg_utils
from teachvllm.arg_utils import NOT_YET, EngineArgs, hint_if_busy, resolve_dtype
from teachvllm.config import NotSupportedYet, UnknownArgument, defined_fields
from teachvllm.transformers_utils import PLAIN_FAMILIES, load_hf_config, read_config

# The arguments of vLLM, by version, with its defaults
VLLM = json.loads(Path(__file__).with_name("vllm_engine_arguments.json").read_text())


@pytest.mark.parametrize("version", VLLM)
def test_every_argument_of_vllm_is_known(version: str) -> None:
    """Each is accepted at vLLM's own default, and as None; another value is served or refused by
    name, never called unknown.
    """
    defaults = {
        name: value
        for name, value in VLLM[version].items()
        if name not in ("model", "scheduler_cls")
    }
    config = EngineArgs(**defaults).create_engine_config()
    assert config.parallel_config.worker_cls == "teachvllm.worker.worker.Worker"
    EngineArgs(**dict.fromkeys(VLLM[version])).create_engine_config()


def test_an_argument_that_is_not_served_is_refused_by_name() -> None:
    assert len(VLLM["0.8.5"]) == 105 and len(VLLM["0.33.0"]) == 260
    switches = [
        name
        for name, (values, _) in NOT_YET.items()
        if any(x is True for x in values) and False in values
    ]
    # no value of these asks for anything
    assert "disable_cascade_attn" in switches and len(switches) < 20
    for name in NOT_YET.keys() - set(switches):
        with pytest.raises(
            NotSupportedYet, match=f"`{name}='something'` is not in teachvllm yet: "
        ):
            EngineArgs(**{name: "something"})
    EngineArgs(
        task="generate",
        hf_overrides={},
        limit_mm_per_prompt={},
        model_impl="vllm",
        runner="generate",
    )
    with pytest.raises(UnknownArgument, match="did you mean `gpu_memory_utilization`"):
        EngineArgs(gpu_memory_utilisation=0.5)


def test_cheap_checks_come_before_the_model() -> None:
    for name, wrong in (("block_size", 0), ("pipeline_parallel_size", 0), ("load_format", "zip")):
        with pytest.raises(ValueError, match=f"{name}="):
            EngineArgs("./nowhere", **{name: wrong}).create_engine_config()


def test_a_t5_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]})
    )
    with pytest.raises(NotSupportedYet, match="encoder with a decoder"):
        EngineArgs(str(tmp_path), load_format="dummy").create_engine_config()


def test_a_length_beyond_the_models_own_is_refused_in_vllms_words() -> None:
    with pytest.raises(
        ValueError, match="max_model_len=10000 is greater than the derived max_model_len=8192"
    ):
        EngineArgs(max_model_len=10000).create_engine_config()


def test_revisions_reach_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    "Each its own, of the model and of the tokenizer, which may be another revision of the model's."
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = []

    def download(model: str, revision: str | None = None, **options) -> str:
        asked.append((model, revision))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for tokenizer in ("a/tokenizer", None):
        args = EngineArgs(
            "a/model",
            revision="v1",
            tokenizer=tokenizer,
            tokenizer_revision="v2",
            load_format="dummy",
        )
        assert args.create_engine_config().model_config.path == tmp_path
    assert asked == [("a/model", "v1"), ("a/tokenizer", "v2"), ("a/model", "v1"), ("a/model", "v2")]


# Plugins


def test_a_plugin_that_leaves_is_passed_over(tmp_path: Path) -> None:
    "Said, as other errors are; the next one is called. Ctrl-C goes through."
    (tmp_path / "mine.py").write_text(
        "import sys\n\ndef leave():\n    sys.exit('wrong version')\n\ndef interrupt():\n   "
        " raise KeyboardInterrupt\n\n"
        "def fine():\n    print('called')\n"
    )
    metadata = tmp_path / "mine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    lines = [f"{name} = mine:{name}" for name in ("leave", "fine", "interrupt")]
    (metadata / "entry_points.txt").write_text("\n".join(["[teachvllm.general_plugins]", *lines]))
    code = """
import os, teachvllm.plugins
from teachvllm.plugins import load_general_plugins
os.environ["TEACHVLLM_PLUGINS"] = "leave,fine"
assert load_general_plugins() == ("fine",)
load_general_plugins.cache_clear()
os.environ["TEACHVLLM_PLUGINS"] = "interrupt"
try:
    load_general_plugins()
except KeyboardInterrupt:
    print("interrupted")
"""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(arg_utils.__file__).parents[1])]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=env
    )
    assert (done.returncode, done.stdout.split()) == (0, ["called", "interrupted"]), done.stderr
    assert "'leave' (mine:leave) failed" in done.stderr and "wrong version" in done.stderr


# CUDA


def test_the_dtype_is_found_without_cuda(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args):
        raise AssertionError("this starts CUDA in the front's process")

    for name in (
        "get_device_capability",
        "init",
        "_lazy_init",
        "is_available",
        "get_device_properties",
    ):
        monkeypatch.setattr(torch.cuda, name, fail)
    for capability, expected in (((9, 0), "bfloat16"), ((7, 5), "float16"), (None, "bfloat16")):
        monkeypatch.setattr(arg_utils, "gpu_capability", lambda capability=capability: capability)
        caplog.clear()
        assert resolve_dtype("auto", "cuda", "bfloat16") == expected
        said = [record.message.partition(")")[0] for record in caplog.records]
        assert said == ["This GPU (with compute capability 7.5"] * (expected == "float16")
        # asked for by name, or for float32's sake: nothing gives way
        assert resolve_dtype("bfloat16", "cuda", "bfloat16") == "bfloat16"
        assert resolve_dtype("auto", "cuda", "float32") == "float16"
        assert len(caplog.records) == len(said)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert arg_utils.DeviceConfig().device == "cuda"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert arg_utils.DeviceConfig().device == "cpu"


@pytest.mark.parametrize("numba", [True, False])
@pytest.mark.parametrize("bf16, vnni", [(True, True), (False, True), (False, False)])
def test_dtype_of_a_processor(monkeypatch, bf16, vnni, numba):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)
    monkeypatch.setattr(arg_utils, "find_spec", lambda name: numba)
    assert resolve_dtype("auto", "cpu") == ("bfloat16" if bf16 else "float32")
    by_bytes = bf16 or vnni and numba
    assert resolve_dtype("auto", "cpu", quantized=True) == ("bfloat16" if by_bytes else "float32")
    assert resolve_dtype("float32", "cpu", quantized=True) == "float32"


def test_the_capability_is_the_one_that_nvml_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    "On a stand-in for its module: of the first GPU that CUDA_VISIBLE_DEVICES names."

    def fail() -> None:
        raise RuntimeError("NVML: no driver")

    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: f"GPU {index}",
        nvmlDeviceGetCudaComputeCapability=lambda handle: (int(handle.split()[1]), 6),
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,1")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert arg_utils.gpu_capability() == (8, 6)
    monkeypatch.setattr(nvml, "nvmlInit", fail)
    assert arg_utils.gpu_capability() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    assert arg_utils.gpu_capability() is None


@pytest.mark.gpu
def test_a_configuration_starts_no_cuda() -> None:
    "A forked child can use the GPU afterwards, and the capability is the one that CUDA reports."
    code = """
import os, torch
from teachvllm.arg_utils import EngineArgs, gpu_capability
config = EngineArgs(load_format="dummy").create_engine_config()
found = gpu_capability()
assert config.device_config.device == "cuda" and found and not torch.cuda.is_initialized()
pid = os.fork()
if pid == 0:
    os._exit(0 if torch.cuda.get_device_capability() == found and torch.ones(1, device="cuda").item() == 1 else 1)
assert os.waitpid(pid, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


# Threads


@pytest.mark.parametrize(
    ("load", "threads", "said"), [(1.0, 8, 0), (8.0, 8, 0), (12.0, 1, 0), (12.0, 8, 1)]
)
def test_a_busy_machine_is_mentioned_and_no_thread_count_changes(
    load: float,
    threads: int,
    said: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*args):
        raise AssertionError("the number of threads is the user's")

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch, "set_num_threads", fail)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 1.0, 1.0))
    with caplog.at_level(logging.INFO, "teachvllm"):
        hint_if_busy()
    assert [record.message.count("try OMP_NUM_THREADS=1") for record in caplog.records] == [
        1
    ] * said
    # and an engine on a CPU asks, one on a GPU does not
    with caplog.at_level(logging.INFO, "teachvllm"):
        for device in ("cpu", "cuda"):
            caplog.clear()
            monkeypatch.setattr(
                torch.cuda, "device_count", lambda device=device: int(device == "cuda")
            )
            EngineArgs(load_format="dummy").create_engine_config()
            assert len(caplog.records) == said * (device == "cpu")


# Configurations that are read without transformers

SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
FILES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "sizes": SIZES,
    "a head's size": SIZES | {"head_dim": 24, "num_key_value_heads": 2},
    "positions": SIZES | {"rope_theta": 5e5, "rope_scaling": None},
    "positions as today": SIZES | {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}},
    "a window": SIZES | {"sliding_window": 7},
    "tied": SIZES | {"tie_word_embeddings": True, "eos_token_id": [1, 2], "dtype": "bfloat16"},
    "of another time": SIZES | {"torch_dtype": "float16", "architectures": ["OtherForCausalLM"]},
    "unknown to its class": SIZES | {"attention_bias": True, "something": 3},
}


@pytest.mark.parametrize("fields", FILES.values(), ids=FILES)
@pytest.mark.parametrize("model_type", PLAIN_FAMILIES)
def test_plain_configurations_are_transformers(
    tmp_path: Path, model_type: str, fields: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields | {"model_type": model_type}))
    theirs = load_hf_config(tmp_path)
    ours = read_config(tmp_path)
    assert ours is not None
    known = {*defined_fields(theirs), *fields, "model_type", "is_encoder_decoder"}
    for name in known - {"dtype", "torch_dtype", "architectures", "rope_theta", "rope_scaling"}:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.defined_fields == defined_fields(theirs)
    assert str(ours.dtype).removeprefix("torch.") == str(theirs.dtype).removeprefix("torch.")
    expected = theirs.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    assert ours.architectures == expected
    back = ours.to_dict()  # asked of a configuration of transformers
    assert {name: back[name] for name in ours.defined_fields} == {
        name: getattr(theirs, name) for name in ours.defined_fields
    }


def test_a_llama_may_leave_sizes_to_its_class(tmp_path: Path) -> None:
    fields = SIZES | {"model_type": "llama", "head_dim": None, "num_key_value_heads": None}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    ours = read_config(tmp_path)
    theirs = load_hf_config(tmp_path)
    assert ours is not None
    for name in ("head_dim", "num_key_value_heads"):
        assert getattr(ours, name) == getattr(theirs, name)


NOT_PLAIN: dict[str, dict[str, Any]] = {
    "another family": {"model_type": "gemma2"},
    "code of its own": {"model_type": "llama", "auto_map": {"AutoConfig": "x.Y"}},
    "scaled positions": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "scaled positions as today": {
        "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}
    },
    "windows": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8},
    "layers": {"model_type": "qwen3", "layer_types": ["sliding_attention"] * 32},
    "labels": {"num_labels": 3},
}


@pytest.mark.parametrize("fields", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_other_configurations_are_left_to_transformers(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | fields))
    assert read_config(tmp_path) is None
    (tmp_path / "config.json").write_text("{")
    assert read_config(tmp_path) is None


def test_an_engine_starts_without_transformers(tmp_path: Path) -> None:
    "The second time, when the tokenizer's rules are kept; greedy tokens stay the same."
    program = (
        "import sys; from teachvllm import LLM, SamplingParams\n"
        "llm = LLM(max_model_len=64, num_gpu_blocks_override=8, enforce_eager=True)\n"
        "params = SamplingParams(temperature=0, max_tokens=3)\n"
        "(out,) = llm.generate('The capital of France is', params, use_tqdm=False)\n"
        "print(out.outputs[0].token_ids, 'transformers' in sys.modules)\n"
    )
    environment = os.environ | {"TEACHVLLM_CACHE": str(tmp_path)}
    said = [
        subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, check=True
        ).stdout.decode()
        for _ in range(2)
    ]
    assert said[0].split("]")[1].strip() == "True" and said[1].split("]")[1].strip() == "False"
    assert said[0].split("]")[0] == said[1].split("]")[0]
