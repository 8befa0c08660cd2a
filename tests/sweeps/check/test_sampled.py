"""`specbatch check --sampled`: exact engines pass, wrong acceptance rules do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crossed import slow_but
from engine_faults import config_of, every_draft_accepted
from scipy import stats
from targets import Targets

from specbatch.engine.device import acceptance
from specbatch.records.store import load_record
from specbatch.sweeps.check.chi_square import ChiSquare, of_counts, smallest_distance
from specbatch.sweeps.check.options import CheckOptions
from specbatch.sweeps.check.sampled import SAMPLING, SampledReport, run_sampled

DRAFTERS = (
    "model",
    "none",
    "ngram",
    "ngram-tree",
    "model-block",
    "model-tree",
    "eagle",
    "eagle-tree",
    "eagle3",
    "mtp",
    "dflash",
)


@pytest.fixture
def check(targets: Targets, tmp_path: Path, use_checkpoints: Any) -> Callable[..., SampledReport]:
    """`check(name of SPECULATIONS, **settings of CheckOptions)` over a tiny Llama."""

    use_checkpoints(lambda model, *_, **__: targets.checkpoint(model))

    def call(name: str, **options: Any) -> SampledReport:
        config = config_of(targets, "llama", name, max_running=100, max_model_len=64)
        source = tmp_path / "in.jsonl"
        source.write_text(json.dumps({"prompt_token_ids": targets.prompts("llama")[4]}) + "\n")
        options = {"source": source, "sampled": True, "seeds": 250, "concurrency": 100} | options
        return run_sampled(config, CheckOptions(**options), tmp_path)

    return call


@pytest.mark.parametrize("name", slow_but(("model",), DRAFTERS))
def test_sampled_tokens_follow_the_distribution(check: Any, tmp_path: Path, name: str) -> None:
    report = check(name, seeds=110 if name == "model" else 250)
    assert not report.fails, report.markdown()
    assert len(report.rows) == 2 * len(SAMPLING)
    tested = [row for row in report.rows if row["freedom"]]
    assert {row["tokens"] for row in tested} == {"first", "later"}
    assert len(tested) > 5
    assert all(0.02 < row["smallest_distance"] < 0.5 for row in tested)
    if name not in ("none", "eagle3", "dflash"):
        metrics = report.record.metrics
        assert 0.05 < metrics["accepted_tokens"] / metrics["drafted_tokens"] < 0.99, "both outcomes must occur"
    assert f"PASSED: no deviation from the exact distribution in {len(tested)} tests." in report.markdown()
    assert load_record("folder", tmp_path) == report.record


def test_check_that_tests_no_verify_fails(check: Any) -> None:
    report = check("model", seeds=50)
    assert report.untested is None
    bare = replace(report, tested=[replace(item, later=ChiSquare()) for item in report.tested])
    assert bare.fails
    assert "NOT TESTED: no token of a verify was counted, which needs 30 requests" in bare.markdown()
    idle = replace(report, record=replace(report.record, metrics=report.record.metrics | {"drafted_tokens": 0}))
    assert idle.fails
    assert "NOT TESTED: nothing was drafted" in idle.markdown()
    assert "PASSED" not in bare.markdown() + idle.markdown()


def residual_is_the_target(patch: pytest.MonkeyPatch) -> None:
    """A rejected draft is replaced by a sample from p, not from max(p - q, 0)."""
    sample, flat = acceptance._rejection_sample, torch.Tensor.clamp

    def wrong(p: Any, proposal: Any, positions: Any, sampling: Any, verification: str = "token") -> Any:
        with pytest.MonkeyPatch.context() as inner:
            # Of negative numbers nothing is left then, so that the rule falls back to p.
            inner.setattr(torch.Tensor, "clamp", lambda x, *a, **k: flat(x, *a, **k) * 0)
            return sample(p, proposal, positions, sampling, verification)

    patch.setattr(acceptance, "_rejection_sample", wrong)


def residual_is_not_normalized(patch: pytest.MonkeyPatch) -> None:
    """The sample from what is left of p and q is drawn as if that summed up to 1."""
    sample = acceptance.sample_ref

    def wrong(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        mass = weights.sum(-1, keepdim=True).clamp(max=1)
        rest = torch.zeros_like(weights).scatter_(-1, weights.argmax(-1, keepdim=True), 1 - mass)
        return sample(weights + rest, u)

    patch.setattr(acceptance, "sample_ref", wrong)


RULES = {
    "accepts everything": every_draft_accepted,
    "residual is the target": residual_is_the_target,
    "residual is not normalized": residual_is_not_normalized,
}


@pytest.mark.parametrize("rule", slow_but(("residual is not normalized",), RULES))
def test_wrong_acceptance_rule_is_found(check: Any, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    RULES[rule](monkeypatch)
    report = check("model", seeds=110)
    assert report.fails, report.markdown()
    assert {row["tokens"] for row in report.rows if row["deviates"]} == {"later"}, "the first token is not verified"
    assert "FAILED: the distribution of sampled tokens is wrong with temperature 1 (later tokens)" in report.markdown()


# -- statistics -------------------------------------------------------------------------------------------------------


def test_chi_square_merges_rare_tokens() -> None:
    chances = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.03, 0.01, 0.0])
    counts = torch.tensor([52.0, 28, 9, 5, 4, 1, 1])
    found = of_counts(counts, chances)
    expected = stats.chisquare([52, 28, 9, 11], [50, 30, 10, 10])
    assert found.freedom == 3
    assert (found.statistic, found.p_value) == pytest.approx((expected.statistic, expected.pvalue), rel=1e-6)
    assert of_counts(torch.tensor([7.0, 0.0]), torch.tensor([1.0, 0.0])) == ChiSquare()
    one = of_counts(torch.tensor([90.0, 10.0]), torch.tensor([1.0, 0.0]))
    assert one == ChiSquare(), "one cell: the filter leaves a single token"


@pytest.mark.parametrize(("freedom", "count"), [(1, 500), (12, 2000), (90, 2000)])
def test_smallest_distance_has_the_promised_power(freedom: int, count: int) -> None:
    distance = smallest_distance(freedom, count, 0.001, 0.8)
    critical = stats.chi2.isf(0.001, freedom)
    assert stats.ncx2.sf(critical, freedom, 4 * distance**2 * count) == pytest.approx(0.8, abs=0.02)
