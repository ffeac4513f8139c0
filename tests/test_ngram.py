"""What followed the text's last tokens before: three forms that find the same, and the proposer."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from helpers import make_tiny, random_prompts
from hypothesis import example, given, settings
from hypothesis import strategies as st

from teachvllm import LLM, SamplingParams
from teachvllm.speculative import ngram
from teachvllm.speculative.ngram import (
    NgramSearch,
    find_continuation,
    find_continuation_naive,
)

FORMS = {"numpy": find_continuation}
if (kernel := ngram._KERNELS.find("find")) is not None:
    FORMS["numba"] = kernel


def texts(max_size: int = 60) -> Any:
    "Of few different tokens, so that their ends were there before."
    return st.integers(1, 4).flatmap(
        lambda size: st.lists(st.integers(0, size - 1), max_size=max_size)
    )


@settings(max_examples=600, deadline=None, derandomize=True)
@given(texts(), st.integers(1, 6), st.integers(0, 5), st.integers(0, 9))
@example([], 1, 1, 3)
@example([7], 1, 4, 3)
@example([1, 1], 1, 5, 9)
@example([1, 2, 1, 2], 3, 9, 9)
def test_forms_find_the_same(text: list[int], min_n: int, more: int, k: int) -> None:
    expected = list(find_continuation_naive(text, min_n, min_n + more, k))
    token_ids = np.array(text, np.int32)
    for name, form in FORMS.items():
        found = form(token_ids, min_n, min_n + more, k)
        assert found.dtype == np.int32 and found.tolist() == expected, name
        assert not len(found) or np.shares_memory(found, token_ids)


@pytest.mark.parametrize("form", FORMS)
def test_long_texts(form: str) -> None:
    "Against numpy's own windows."
    rng = np.random.default_rng(0)
    for vocab_size in (2, 30, 3000):
        token_ids = rng.integers(0, vocab_size, 30_000).astype(np.int32)
        for n in (1, 2, 3):
            windows = np.lib.stride_tricks.sliding_window_view(token_ids, n)
            same = np.flatnonzero((windows[:-1] == token_ids[-n:]).all(1))
            found = FORMS[form](token_ids, n, n, 5)
            expected = token_ids[same[-1] + n :][:5] if len(same) else token_ids[:0]
            assert np.array_equal(found, expected)


def test_what_is_found() -> None:
    text = np.array([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], np.int32)
    for form in FORMS.values():
        assert form(text, 1, 3, 2).tolist() == [9, 2]  # the longest end
        assert form(text, 1, 2, 2).tolist() == [8, 1]  # of equals the latest
        assert form(text, 4, 5, 2).tolist() == []
        assert form(np.array([5, 6, 5, 6], np.int32), 1, 5, 4).tolist() == [5, 6]  # and no more


@pytest.mark.parametrize("numba", [True, False])
def test_the_proposer_gives_each_sequence_its_number(numba: bool) -> None:
    text = np.array([4, 1, 2, 3, 4, 5, 1, 2, 3], np.int32)
    step = SimpleNamespace(token_ids=[text, text, text[:3], text], num_drafts=[2, 0, 4, 9])
    with patch.dict(ngram._KERNELS.found, {} if numba else {"find": None}):
        proposer = NgramSearch(prompt_lookup_min=2, prompt_lookup_max=3)
        assert (proposer.find is find_continuation) == (not numba or "numba" not in FORMS)
    before = text.copy()
    assert proposer.propose(step) == [[4, 5], [], [], [4, 5, 1, 2, 3]]
    assert np.array_equal(text, before)


def test_without_numba_it_is_numpys() -> None:
    hidden = {"numba": None, "teachvllm.cpu_kernels.ngram": None}
    with patch.dict(sys.modules, hidden), patch.dict(ngram._KERNELS.found, clear=True):
        with patch.object(ngram._KERNELS, "given_up", set()):
            assert NgramSearch(1, 2).find is find_continuation


@pytest.mark.parametrize(
    "low, high, says",
    [(0, 3, "prompt_lookup_min=0 must be > 0"), (1, 0, "max=0 must be > 0"), (3, 2, "must be <=")],
)
def test_numbers_that_make_no_sense_are_refused(low: int, high: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        NgramSearch(low, high)


def test_guesses_in_the_engine_change_no_text(tmp_path: Path) -> None:
    "A tiny model repeats itself when it is greedy, so there are steps to save; seeds hold, too."
    make_tiny("llama", tmp_path)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    drawn = SamplingParams(temperature=0.3, max_tokens=40, ignore_eos=True, seed=3)
    params = [greedy, drawn, greedy]
    options = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 100}
    with LLM(str(tmp_path), device="cpu", num_gpu_blocks_override=80, **options) as llm:
        core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        core.preparers.append(lambda request, group: setattr(group, "wants_drafts", True))
        proposer = NgramSearch(prompt_lookup_min=1, prompt_lookup_max=3)

        def draft(scheduler: Any) -> dict[int, list[int]]:
            known = {i: np.array(s.token_ids, np.int32) for i, (_, s) in scheduler.seqs.items()}
            step = SimpleNamespace(token_ids=list(known.values()), num_drafts=[3] * len(known))
            return dict(zip(known, proposer.propose(step), strict=True))

        found = []
        for drafter in (None, draft):
            core.drafter = drafter
            with llm.record() as trace:
                outputs = llm.generate(
                    random_prompts(3, longest=20, seed=1), params, use_tqdm=False
                )
            found.append([out.outputs[0].token_ids for out in outputs])
            steps = sum(bool(step.num_scheduled_tokens) for step in trace.steps)
            found.append(steps)
    assert found[0] == found[2] and found[3] < found[1]
