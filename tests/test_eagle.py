"""EAGLE heads: drafts are what the paper's arithmetic gives, whole prompts or pieces of them; the
text is what it would have been; a head that does not fit is refused.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import VOCAB, make_tiny, random_prompts
from safetensors.torch import load_file, save_file
from test_speculative import LIMITS, WORLDS, answers, policy_of, random_requests, speculate
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from teachvllm import LLM, SamplingParams
from teachvllm.config import NotSupportedYet
from teachvllm.model_executor.layers import WeightsError
from teachvllm.speculative.eagle import EagleProposer
from teachvllm.worker.model_runner import DraftStep

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


class PlainHead(nn.Module):
    "The head as the paper has it, on whole texts, by transformers."

    def __init__(self, config: LlamaConfig, bias: bool = False):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias)
        layer = LlamaDecoderLayer(config, 0)
        del layer.input_layernorm
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        "[n, hidden_size] each, of one text: token i + 1 and the state of token i."
        x = self.fc(torch.cat([embeddings, hidden], -1))[None]
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        window = self.config.sliding_window if hasattr(self.config, "sliding_window") else None
        if window:
            mask += torch.full((x.shape[1],) * 2, -torch.inf).tril(-window)[None, None]
        rotary = LlamaRotaryEmbedding(self.config)(x, positions)
        found = self.layers[0](x, attention_mask=mask, position_embeddings=rotary)
        return (found[0] if isinstance(found, tuple) else found).view(-1, x.shape[-1])

    def save(self, folder: Path, **fields: Any) -> str:
        "As public checkpoints are."
        self.config.save_pretrained(folder)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]} | fields))
        save_file(dict(self.state_dict()), folder / "model.safetensors", {"format": "pt"})
        return str(folder)


def make_head(target: str, bias: bool = False) -> PlainHead:
    "One with random weights, large enough that all of it matters."
    config = AutoModelForCausalLM.from_pretrained(target).config
    config.num_hidden_layers = 1
    torch.manual_seed(1)
    head = PlainHead(config, bias).eval()
    for parameter in head.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    return head


@pytest.fixture(scope="module")
def head(folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_head(folder).save(tmp_path_factory.mktemp("head"))


def make(folder: str, head: str, **more: Any) -> LLM:
    return LLM(folder, **{**LIMITS, "speculative_config": speculate("eagle", head), **more})


@torch.inference_mode()
def plain_drafts(model: Any, head: PlainHead, text: list[int], number: int) -> list[int]:
    "Greedy drafts behind `text`: the first from the target's states, then from guessed ones."
    hidden = model.model(torch.tensor([text[:-1]])).last_hidden_state[0]
    embed = model.get_input_embeddings()
    drafts: list[int] = []
    for _ in range(number):
        guessed = head(embed(torch.tensor((text + drafts)[1:])), hidden)[-1:]
        drafts.append(int(model.lm_head(guessed)[0].argmax()))
        hidden = torch.cat([hidden, guessed])
    return drafts


class Noted(EagleProposer):
    "Keeps what it was asked and what it said."

    notes: list[tuple[list[int], list[int]]] = []

    def propose(self, step: DraftStep) -> list[list[int]]:
        texts = [token_ids.tolist() for token_ids in step.token_ids]
        drafts = super().propose(step)
        self.notes.extend(zip(texts, drafts, strict=True))
        return drafts


EXACT = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 9},
    "preempted": {"num_gpu_blocks_override": 30},
    "eager": {"enforce_eager": True},
    "alone": {"max_num_seqs": 1},
}


@pytest.mark.parametrize("world", EXACT)
def test_drafts_are_the_papers(
    folder: str, head: str, world: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    "Each draft of each step, right or wrong, is what whole texts through the plain head give."
    monkeypatch.setattr("teachvllm.speculative.eagle.EagleProposer", Noted)
    monkeypatch.setattr(Noted, "notes", [])
    llm = make(folder, head, enable_prefix_caching=False, **EXACT[world])
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts(10, 40)]
    lengths = random.Random(3)
    params = [SamplingParams(**GREEDY, max_tokens=lengths.randint(2, 20)) for _ in prompts]
    llm.generate(prompts, params, use_tqdm=False)
    preemptions = llm.llm_engine.engine_core.engine_core.scheduler.num_preemptions
    assert (preemptions > 0) == (world == "preempted")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    plain = make_head(folder)
    assert len(Noted.notes) > 50
    for text, drafts in Noted.notes:
        assert drafts == plain_drafts(model, plain, text, len(drafts))


@pytest.mark.parametrize("world", WORLDS)
def test_no_token_changes(folder: str, head: str, world: str) -> None:
    "Greedy and sampled, whole and in chunks, preempted, swapped, forked, with penalties."
    requests = random_requests(random.Random(f"eagle {world}"), 24)
    expected = answers(LLM(folder, **{**LIMITS, **WORLDS[world]}), requests)
    llm = make(folder, head, **WORLDS[world])
    assert answers(llm, requests) == expected
    assert answers(llm, requests) == expected  # prompts are in the cache now
    assert policy_of(llm).stats.num_draft_tokens > 0
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    free = scheduler.block_manager.get_num_free_gpu_blocks()
    assert free == scheduler.block_manager.num_gpu_blocks


@pytest.mark.parametrize("world", ["plain", "chunked", "few_blocks", "eager"])
def test_a_perfect_head(tmp_path: Path, world: str) -> None:
    """A target of one layer in which hidden states tell nothing new: windows of four tokens, so that
    the first token, of which a head has no pair, is soon out of sight; embeddings that a norm leaves
    as they are. Its own layer is then a head whose every draft is right.
    """
    torch.manual_seed(2)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        sliding_window=4,
        head_dim=16,
    )
    model = AutoModelForCausalLM.from_config(config).eval().float()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    embedding = model.get_input_embeddings().weight.data
    embedding /= embedding.square().mean(1, keepdim=True).sqrt()
    model.save_pretrained(tmp_path / "target")
    layer = {
        name.removeprefix("model."): tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    head = tmp_path / "head"
    config.save_pretrained(head)
    config_file = head / "config.json"
    fields = json.loads(config_file.read_text()) | {"architectures": ["MistralForCausalLM"]}
    config_file.write_text(json.dumps(fields))
    fc = torch.cat([torch.eye(64), torch.zeros(64, 64)], 1)
    save_file({"fc.weight": fc, **layer}, head / "model.safetensors", {"format": "pt"})

    rng = random.Random(world)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(6, 40))] for _ in range(12)]
    requests = [(p, SamplingParams(**GREEDY, max_tokens=rng.randint(5, 30))) for p in prompts]
    expected = answers(LLM(str(tmp_path / "target"), **{**LIMITS, **WORLDS[world]}), requests)
    llm = make(str(tmp_path / "target"), str(head), **WORLDS[world])
    assert answers(llm, requests) == expected
    stats = policy_of(llm).stats
    assert stats.num_draft_tokens > 100
    assert stats.acceptance == 1


def test_noise_is_the_targets(folder: str, head: str) -> None:
    "Where sampling is nearly noise alone, even a head that knows nothing is often right."
    llm = make(folder, head)
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts(8, 20)]
    params = SamplingParams(temperature=50.0, max_tokens=30, ignore_eos=True, seed=5)
    llm.generate(prompts, params, use_tqdm=False)
    stats = policy_of(llm).stats  # two tokens drawn freely agree once in 128 times
    assert stats.num_accepted_tokens_per_pos[0] > 0.5 * stats.num_drafts


def test_public_forms(folder: str, tmp_path: Path) -> None:
    "A `.bin` file, a bias, and an embedding that is the target's."
    head = make_head(folder, bias=True)
    path = Path(head.save(tmp_path / "head"))
    (path / "model.safetensors").unlink()
    state = {name: tensor.half() for name, tensor in head.state_dict().items()}
    torch.save(state | {"embed_tokens.weight": torch.zeros(VOCAB, 64)}, path / "pytorch_model.bin")
    requests = random_requests(random.Random(0), 6)
    expected = answers(LLM(folder, **LIMITS), requests)
    llm = make(folder, str(path), enforce_eager=True)
    assert answers(llm, requests) == expected
    (loaded,) = llm.collective_rpc(lambda worker: worker.model_runner.proposer.head.fc.bias)
    assert torch.equal(loaded, head.fc.bias.half().float())


def test_two_ranks(folder: str, head: str) -> None:
    "Each has the whole head."
    requests = random_requests(random.Random(1), 12)
    options = {**LIMITS, "tensor_parallel_size": 2}
    with LLM(folder, **options) as plain:
        expected = answers(plain, requests)
    with make(folder, head, **options) as llm:
        assert answers(llm, requests) == expected
        assert policy_of(llm).stats.num_draft_tokens > 0


def spoil(head: Path, config: dict[str, Any], tensors: dict[str, Any]) -> None:
    "Change fields of a head's configuration, and its tensors: None takes one away."
    path = head / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    state = load_file(head / "model.safetensors") | tensors
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    save_file(state, head / "model.safetensors", {"format": "pt"})


BROKEN: dict[str, Any] = {
    "hidden_size": ({"hidden_size": 32, "head_dim": 16}, {}, ValueError, "its hidden_size is 32"),
    "vocab_size": ({"vocab_size": 100}, {}, ValueError, "its vocab_size is 100, the model's 128"),
    "head_dim": ({"head_dim": 32}, {}, ValueError, "its head_dim is 32, the model's 16"),
    "layers": ({"num_hidden_layers": 2}, {}, NotSupportedYet, "has 2 layers"),
    "fc": ({}, {"fc.weight": torch.zeros(64, 64)}, WeightsError, r"fc.weight has shape \(64, 64\)"),
    "no fc": ({}, {"fc.weight": None}, WeightsError, "lacks 1 of .*fc.weight"),
    "a norm": (
        {},
        {"layers.0.input_layernorm.weight": torch.ones(64)},
        WeightsError,
        "has no such norm",
    ),
    "eagle3": ({"architectures": ["LlamaForCausalLMEagle3"]}, {}, NotSupportedYet, "EAGLE-3"),
    "d2t": ({}, {"d2t": torch.zeros(3)}, NotSupportedYet, "EAGLE-3"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_refused(folder: str, what: str, tmp_path: Path) -> None:
    config, tensors, error, message = BROKEN[what]
    path = make_head(folder).save(tmp_path / "head")
    spoil(Path(path), config, tensors)
    with pytest.raises(error, match=message):
        make(folder, path)


def test_refused_arguments(folder: str, head: str, tmp_path: Path) -> None:
    make_tiny("opt", tmp_path)
    with pytest.raises(NotSupportedYet, match="OPTForCausalLM"):
        make(str(tmp_path), head)
    with pytest.raises(NotSupportedYet, match="quantization='int8' of an EAGLE head"):
        make(folder, head, speculative_config=speculate("eagle", head, quantization="int8"))
    with pytest.raises(ValueError, match="does not exist"):
        make(folder, "/nowhere/head")


def test_sleep(folder: str, head: str) -> None:
    requests = random_requests(random.Random(2), 4)
    llm = make(folder, head)
    expected = answers(llm, requests)
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert answers(llm, requests) == expected
