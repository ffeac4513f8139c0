"""What several test files need: tiny models with random weights, and transformers' answers to
compare with.
"""

import ast
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, OPTConfig

ROOT = Path(__file__).resolve().parents[1]
VOCAB = 128
# where two workers have a device each: a machine's one GPU is not enough
FOR_TWO = "cpu" if torch.cuda.device_count() == 1 else "auto"

TINY = {
    "llama": lambda: LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    ),
    "llama-tied-biased": lambda: LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    ),
    "llama3-rope": lambda: LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 10000.0,
        },
    ),
    "opt": lambda: OPTConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=64,
    ),
    "opt-350m-like": lambda: OPTConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=32,
        do_layer_norm_before=False,
    ),
}


def make_tiny(name: str, folder: Path, layers: int | None = None, **save: Any) -> Any:
    """Write the tiny model `name`, perhaps with fewer layers, into `folder`, with weights large
    enough that no two tokens tie; returns transformers' model.
    """
    torch.manual_seed(0)
    config: Any = TINY[name]()
    config.num_hidden_layers = layers or config.num_hidden_layers
    model = AutoModelForCausalLM.from_config(config).eval().float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder, **save)
    return model


def runner_of(llm: Any) -> Any:
    "The model runner of an engine's first worker, which is in this process."
    return llm.collective_rpc(lambda worker: worker.model_runner)[0]


def random_prompts(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    "Prompts of random ids, of different lengths."
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    "transformers' greedy continuation of one prompt, EOS ignored."
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=[10**9],
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def compiling_env(**more: str) -> dict[str, str]:
    "This process's variables for a child whose Triton compiles, and `more`."
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return env | more


def run_compiling(*argv: str, **more: str) -> subprocess.CompletedProcess[str]:
    "Python with `argv`, in a child whose Triton compiles, until it has ended well."
    command = [sys.executable, "-W", "ignore", *argv]
    env = compiling_env(**more)
    child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=800)
    assert child.returncode == 0, child.stderr[-3000:]
    return child


def on_card(
    card: str,
    *command: str,
    seconds: float = 800,
    count: int = 1,
    forms: str | None = None,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """A command in a process whose card is pretended, one of so many, until it has ended: what
    `python -m teachvllm.pretend` does, without a Python that imports torch only to start another.
    """
    from teachvllm.pretend import environment

    with tempfile.TemporaryDirectory() as folder:
        env = environment(Path(folder), card=card, count=count, num_sms=4, forms=forms)
        paths = [env["PYTHONPATH"], str(ROOT / "tests")]
        env |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **more}
        options: dict[str, Any] = {"capture_output": True, "text": True, "cwd": ROOT}
        return subprocess.run(command, env=env, timeout=seconds, **options)


def answers_on_card(card: str, script: str, *names: str, count: int = 1) -> dict[str, str]:
    "What a script of this folder found there: task -> what went wrong, or an empty text."
    command = [sys.executable, "-W", "ignore", f"tests/{script}", *names]
    done = on_card(card, *command, count=count)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def make_wide(folder: Path, layers: int = 1) -> None:
    "A Llama wide enough for groups of 32, and for `write_adapter`; no two of its tokens tie."
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **shape, **heads))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)


def from_chapter(name: str, *wanted: str) -> list[Any]:
    "Classes that a chapter defines for itself and does not export, made with its imports."
    path = ROOT / "nbs" / f"{name}.ipynb"
    scope: dict[str, Any] = {"__name__": path.stem}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or "eval: false" in source:
            continue
        kept = [
            node
            for node in ast.parse(source).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            or (isinstance(node, ast.ClassDef) and node.name in wanted)
        ]
        exec(compile(ast.Module(kept, []), str(path), "exec"), scope)
    return [scope[one] for one in wanted]


def write_adapter(
    folder: Path, seed: int, rank: int = 4, embedding: bool = False, layers: int = 3
) -> dict[str, torch.Tensor]:
    """A folder as PEFT writes it, without PEFT, for a Llama of `layers`, 128 wide, 192 in its MLPs;
    what it adds to q_proj, down_proj and perhaps the embedding, by name.
    """
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    added = {}

    def pair(width: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.randn(rank, width, generator=generator) / 4
        return a, torch.randn(size, rank, generator=generator) / 4

    for i in range(layers):
        for module, width, size in (("self_attn.q_proj", 128, 128), ("mlp.down_proj", 192, 128)):
            name = f"model.layers.{i}.{module}"
            a, b = pair(width, size)
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
            added[f"{name}.weight"] = 2 * b @ a
    config: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    config |= {"bias": "none", "target_modules": ["q_proj", "down_proj"]}
    if embedding:
        a, b = pair(VOCAB, 128)
        tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = a
        tensors["base_model.model.model.embed_tokens.lora_embedding_B"] = b
        added["model.embed_tokens.weight"] = 2 * (b @ a).T
        config["target_modules"].append("embed_tokens")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return added
