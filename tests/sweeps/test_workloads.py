"""Prompts are seeded, of fixed length, and the same for every configuration."""

from __future__ import annotations

import types
from itertools import pairwise

from specbatch.sweeps.workloads import Workload

TOKENIZER = types.SimpleNamespace(
    vocab_size=50,
    eos_ids=frozenset({3, 4}),
    bos_id=5,
    encode=lambda text, add_special_tokens=True: list(text.encode()),
)


def test_random_prompts_have_their_length_and_no_end_tokens():
    prompts = Workload(input_len=200).prompts(TOKENIZER, 6)
    assert [len(prompt) for prompt in prompts] == [200] * 6
    assert {token for prompt in prompts for token in prompt} == set(range(50)) - {3, 4, 5}


def test_a_larger_point_starts_with_the_prompts_of_a_smaller_one():
    workload = Workload(input_len=9)
    assert workload.prompts(TOKENIZER, 7)[:3] == workload.prompts(TOKENIZER, 3)


def test_the_seed_chooses_the_prompts():
    one, again, other = (Workload(seed=seed).prompts(TOKENIZER, 2) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert one[0] != one[1]


def test_a_point_has_some_prompts_per_request_and_at_least_four():
    workload = Workload(prompts_per_concurrency=2)
    assert [workload.count(concurrency) for concurrency in (1, 2, 8)] == [4, 4, 16]


def test_questions_of_a_file_start_over_when_they_run_out(tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "a", "answer": "1"}\n{"question": "b", "answer": "2"}\n')
    workload = Workload(dataset="gsm8k", data=tmp_path / "q.jsonl", output_len=5)
    prompts = workload.prompts(TOKENIZER, 3)
    assert bytes(prompts[0]).decode() == "Question: a\nAnswer:"
    assert prompts[2] == prompts[0]
    assert workload.describe(prompts)["distinct_prompts"] == 2
    assert not workload.params(1)[0].ignore_eos
    assert Workload(output_len=5).params(1)[0].ignore_eos


def test_the_hash_tells_prompts_apart():
    workload = Workload()
    hashes = {workload.describe(prompts)["prompts_sha256"] for prompts in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]])}
    assert len(hashes) == 3


def test_prompts_of_a_group_share_their_beginning_and_come_in_shuffled_order():
    workload = Workload(dataset="gsp", groups=5, group_prompts=4, shared_len=30, input_len=7)
    assert workload.count(1) == workload.count(9) == 20
    prompts = workload.prompts(TOKENIZER, 20)
    groups = [tuple(prompt[:30]) for prompt in prompts]
    assert {len(prompt) for prompt in prompts} == {37} == {workload.max_model_len - workload.output_len}
    assert sorted(groups.count(group) for group in set(groups)) == [4] * 5
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 20
    assert groups != sorted(groups, key=groups.index), "shuffled"
    assert prompts == workload.prompts(TOKENIZER, 20)


def test_arrivals_are_seeded_and_keep_to_their_rate():
    one, again, other = (Workload(request_rate=10, seed=seed).arrivals(4000) for seed in (1, 1, 2))
    assert one == again != other
    assert one[0] == 0.0
    gaps = [after - before for before, after in pairwise(one)]
    assert min(gaps) > 0
    mean = sum(gaps) / len(gaps)
    assert 0.095 < mean < 0.105
    spread = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert 0.9 < spread / mean**2 < 1.1, "exponential: its spread is its mean"
    assert Workload().arrivals(5) is None
