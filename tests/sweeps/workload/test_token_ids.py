"""Scrambled prompts have the length of the text, and the same or random tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from specbatch.errors import SpecbatchError
from specbatch.sweeps.workload.description import describe
from specbatch.sweeps.workload.heading import lines_of
from specbatch.sweeps.workload.token_ids import scrambled
from specbatch.sweeps.workload.workloads import Workload

TOKENIZER = SimpleNamespace(vocab_size=300, eos_ids=frozenset({256}), bos_id=257)
PROMPTS = [[257, *range(40)], [*range(50, 90)]]


def test_shuffled_prompts_have_the_same_tokens_in_another_order() -> None:
    assert scrambled(TOKENIZER, PROMPTS, "none", 0) == PROMPTS
    found = scrambled(TOKENIZER, PROMPTS, "shuffled", 0)
    assert found != PROMPTS
    assert [sorted(one) for one in found] == [sorted(one) for one in PROMPTS]
    assert found[0][0] == 257, "the bos token stays the first"
    assert scrambled(TOKENIZER, PROMPTS, "shuffled", 0) == found != scrambled(TOKENIZER, PROMPTS, "shuffled", 1)


def test_random_prompts_have_the_length_and_no_end_tokens() -> None:
    found = scrambled(TOKENIZER, PROMPTS * 20, "random", 0)
    assert [len(one) for one in found] == [41, 40] * 20
    assert all(one[0] == 257 for one in found[::2])
    drawn = {token for one in found[::2] for token in one[1:]}
    assert drawn.isdisjoint({256, 257})
    assert len(drawn) > 200


def test_workload_scrambles_text_alone(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7, 8]}\n')
    workload = Workload(str(tmp_path / "q.jsonl"), scramble="shuffled", output_len=3)
    (prompt,) = workload.prompts(TOKENIZER, 1)  # type: ignore[arg-type]
    assert sorted(prompt) == [1, 2, 3, 4, 5, 6, 7, 8] != prompt
    assert "token ids shuffled" in lines_of(describe(workload, [prompt]))["workload"]
    with pytest.raises(SpecbatchError, match="scramble='shuffled': random prompts are random already"):
        Workload(scramble="shuffled")
    with pytest.raises(SpecbatchError, match="scramble='some': use one of none, shuffled, random"):
        Workload("gsm8k", scramble="some")
