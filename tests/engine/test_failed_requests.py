"""A request whose logits are not finite fails alone: other requests, the prefix cache and the engine are unaffected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from crossed import first_quick
from lossless import settings_of
from targets import Targets

from specbatch import Completion, Engine, SamplingParams, Speculation
from specbatch.core.step_input import Proposal, StepInput

GREEDY = SamplingParams(max_new_tokens=10, ignore_eos=True)
PREFIX = [3, 4, 5, 6, 7, 8, 9, 10, 11]
SLOW = pytest.mark.slow
BAD = 36
GOOD = [[*PREFIX, 12], [5, 6], [*PREFIX, 13, 14, 15, 16, 17], [20, 21, 22, 23, 24, 25], [7]]


def failing(bad: int) -> list[list[int]]:
    """Prompts with a token before, within and after the prefix that others share."""
    return [[bad], [3, 4, 5, 6, bad, 8, 9, 10, 11, 12], [*PREFIX, 12, bad], [*PREFIX, bad, 13, 14, 15, 16]]


def damage(engine: Engine, bad: int) -> None:
    """Make the target's embedding of one token NaN. Its output matrix and its draft stay as they are, but the draft no
    longer proposes the token, which would end a request that the baseline completes."""
    embedding = engine.parts.model.embedding.clone()
    embedding[bad] = torch.nan
    engine.parts.model.embedding = embedding
    drafter = engine.parts.worker.decode_step.drafter
    propose = drafter.propose

    def without(step: StepInput) -> Proposal:
        proposal = propose(step)
        proposal.tokens.masked_fill_(proposal.tokens == bad, 3)
        return proposal

    drafter.propose = without  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("target", "drafter"),
    first_quick(3, [
        ("llama", "eagle3"),
        ("qwen3.5", "mtp"),
        ("nemotron-h", "none"),
        ("llama", "model"),
        ("llama", "none"),
        ("llama", "ngram"),
        ("llama", "eagle-tree"),
        ("llama", "dflash"),
        ("llama", "dflash2"),
        ("llama", "dspark"),
        ("llama", "domino"),
        ("llama", "lilicorr"),
        ("llama", "xpress"),
        ("lfm2", "ngram-tree"),
    ]),
)  # fmt: skip
@pytest.mark.parametrize(
    ("schedule", "kv_pages"), [("v2", 40), *(pytest.param(*more, marks=SLOW) for more in [("v2", 200), ("v1", 40)])]
)
def test_only_the_request_itself_fails(
    targets: Targets, target: str, drafter: str, schedule: str, kv_pages: int
) -> None:
    settings = {"page_size": 2, "prefill_chunk": 8, "max_running": 3, "max_model_len": 40, "kv_pages": kv_pages}
    with targets.engine(target, drafter, schedule, **settings | settings_of(target, drafter)) as engine:
        expected = [item.token_ids for item in engine.generate(GOOD, GREEDY)]
        engine.forget_prefixes()
        bad = next(token for token in range(26, 37) if not any(token in tokens for tokens in expected))
        broken = failing(bad)
        prompts = [prompt for pair in zip(broken, GOOD, strict=False) for prompt in pair] + GOOD[len(broken) :]
        damage(engine, bad)
        for _ in range(2):
            completions = engine.generate(prompts, GREEDY)
            good = [item for item in completions if item.prompt_token_ids in GOOD]
            assert [item.token_ids for item in good] == expected
            failed = [item for item in completions if item.prompt_token_ids in broken]
            assert [item.finish_reason for item in failed] == ["error"] * len(broken)
            assert all("not finite after token" in str(item.error) and not item.token_ids for item in failed)
        engine.forget_prefixes()
        assert engine.parts.scheduler.pool.free == engine.parts.scheduler.pool.total


@pytest.mark.parametrize("schedule", ["v1", "v2"])
@pytest.mark.parametrize("chunk", [6, 64])
def test_requests_that_share_pages_with_a_failing_one_succeed(
    toy_engine: Callable[..., Engine], schedule: str, chunk: int
) -> None:
    """Causal attention spreads NaN to earlier tokens of the same pass (0 x NaN), whose pages others share at once."""
    prefix = [3 + (index * 7) % 30 for index in range(16)]
    prompts = [[*prefix, 36, 9], [*prefix, 11], [*prefix, 36, 9, 12], [*prefix, 12, 13]]
    speculation = Speculation(schedule=schedule)
    with toy_engine(model="toy-nan", speculation=speculation, prefill_chunk=chunk, page_size=2) as engine:
        expected = [engine.generate([prompts[place]], GREEDY)[0].token_ids for place in (1, 3)]
        engine.forget_prefixes()
        found = engine.generate(prompts, GREEDY)
        assert [item.finish_reason for item in found] == ["error", "length", "error", "length"]
        assert [found[place].token_ids for place in (1, 3)] == expected
        assert [item.finish_reason for item in engine.generate(prompts[::-1], GREEDY)] == ["length", "error"] * 2


def test_record_counts_failures_and_leaves_them_out_of_metrics(targets: Targets) -> None:
    with targets.engine("llama", "ngram", "v2", page_size=4, max_model_len=40) as engine:
        damage(engine, BAD)
        engine.reset_record()
        engine.generate([*failing(BAD), *GOOD], GREEDY)
        record = engine.record()
    assert record.metrics["requests"] == len(GOOD)
    assert record.metrics["output_tokens"] == len(GOOD) * GREEDY.max_new_tokens
    assert sum(record.counters["errors"].values()) == 4
    assert [row["finish_reason"] for row in record.requests if "error" in row] == ["error"] * 4


@pytest.mark.parametrize("schedule", ["v1", "v2"])
def test_logits_that_break_later_keep_the_tokens_before(
    toy: Any, toy_engine: Callable[..., Engine], schedule: str
) -> None:
    engine = toy_engine(speculation=Speculation(schedule=schedule))
    prompts = [list(prompt) for prompt in toy.prompts()[3:6]]
    expected = [item.token_ids for item in engine.generate(prompts, GREEDY)]
    engine.forget_prefixes()
    scores = engine.parts.worker.decode_step.model.scores
    calls = 0

    def overflow(hidden: torch.Tensor, *, greedy: bool) -> Any:
        nonlocal calls
        calls += 1
        found = scores(hidden, greedy=greedy)
        if calls == 3:
            found[1] = torch.inf
        return found

    engine.parts.worker.decode_step.model.scores = overflow  # type: ignore[method-assign]
    ended: list[Completion] = []
    params = [replace(GREEDY, max_new_tokens=count) for count in (4, 10, 10)]
    found = engine.generate(prompts, params, on_completion=ended.append)
    assert [item.finish_reason for item in found] == ["length", "error", "length"]
    assert found[1].token_ids == expected[1][:3]
    assert found[2].token_ids == expected[2]
    assert f"after token {len(prompts[1]) + 3}" in str(found[1].error)
    assert [item.index for item in ended][:2] == [0, 1]


def test_features_of_the_previous_request_are_dropped(targets: Targets) -> None:
    """A draft head runs all buffered pairs of a slot; those after the ready ones must be finite, too."""
    with targets.engine("llama", "eagle3", "v2") as engine:
        expected = [(item.token_ids, item.metrics.drafted) for item in engine.generate(GOOD, GREEDY)]
        drafter: Any = engine.parts.worker.decode_step.drafter
        drafter._waiting.fill_(torch.nan)
        propose = drafter.propose

        def checked(step: StepInput) -> Proposal:
            assert drafter._waiting[step.slots].isfinite().all()
            return propose(step)  # type: ignore[no-any-return]

        drafter.propose = checked
        assert [(item.token_ids, item.metrics.drafted) for item in engine.generate(GOOD, GREEDY)] == expected
