"""The losslessness matrix: drafter x schedule x graphs x memory x target, and what each of its cases must satisfy."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from shared_prefixes import share_always, share_on_cpu
from stand_ins import fake_graphs, late_results, random_draft_lengths
from targets import MTP, QUANTIZED, SIZES, SPECULATIONS, TARGETS, Targets

from specbatch import Completion, Engine, SamplingParams
from specbatch.config.draft_shape import shape_of
from specbatch.config.engine_config import Graphs
from specbatch.models.config import ModelConfig
from specbatch.models.families import llama

GRAPHS = {
    "eager": Graphs(),
    "whole": Graphs(decode="whole"),
    "piecewise": Graphs(prefill="piecewise"),
    "both": Graphs(decode="whole", prefill="piecewise"),
}
MEMORY = ("roomy", "tight", "shared", "no-cache")
# Trees reserve so many slots that few requests run at a time, and short texts never need another page.
RETRACTED = ("none", "model", "eagle", "eagle3", "mtp", "dflash", "dflash2", "dspark", "domino", "lilicorr", "uno")
RETRACTED += ("xpress",)

# Quick tests have their algorithm, and what is added to it, in other pairs.
REPEATED = ("eagle3-auto", "peagle-auto", "eagle3-corpus-budget", "mtp-budget", "dflash-budget", "dflash-corpus")
REPEATED += (
    "dflash-auto",
    "dspark-budget",
    "lilicorr-auto",
    "ngram-budget-auto",
    "mtp-budget-auto",
    "dspark-budget-auto",
    "model-auto",
    "model-auto-budget-auto",
    "model-budget-auto",
    "eagle3-corpus",
    "mtp-layers-auto",
    "dspark-block-auto",
    "dflash2-tree",
    "domino-tree",
    "xpress-tree",
)

NEW, LONGER = 6, 12  # tokens; the longer for retractions, and for draft lengths drawn at random
FEW = SamplingParams(max_new_tokens=3, ignore_eos=True)
_SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
)
SAMPLED = [
    SamplingParams(max_new_tokens=6, ignore_eos=True, seed=seed, logprobs=True, **how)
    for seed, how in enumerate(_SAMPLED)
]


@dataclass(frozen=True)
class Case:
    drafter: str
    schedule: str
    graphs: str
    memory: str
    target: str

    def __str__(self) -> str:
        return " ".join((self.target, self.drafter, self.schedule, self.graphs, self.memory))

    @property
    def is_auto(self) -> bool:
        return self.drafter.endswith("auto")

    @property
    def has_budget(self) -> bool:
        """Then the tokens of a seed depend on the batch, where drafts are sampled."""
        return "budget" in self.drafter

    @property
    def keeps_seeds(self) -> bool:
        """Without sampled drafts, the tokens of a seed equal the baseline's, up to rounding: of 13,500 draws about one
        lies so close to an edge of the distribution that another order of sums chooses another token."""
        return any(name in self.drafter for name in ("none", "ngram", "tree", "corpus"))

    def settings(self) -> dict[str, Any]:
        found = {"graphs": GRAPHS[self.graphs], "prefill_chunk": 16} | settings_of(self.target, self.drafter)
        if self.memory == "tight":  # little more than one request needs: others are retracted
            rows = slots_per_step(**SPECULATIONS[self.drafter])
            found |= {"max_model_len": 24, "page_size": 2, "kv_pages": 12 + rows + 4, "prefill_chunk": 8}
        if self.memory == "shared":
            found |= {"page_size": 2}
        if self.memory == "no-cache":
            found |= {"prefix_cache": False, "page_size": 1, "prefill_chunk": 5}
        return found


def settings_of(target: str, drafter: str) -> dict[str, Any]:
    """Extra engine settings: a random MTP head if the target's checkpoint has none."""
    return {"load_format": "dummy"} if drafter.startswith("mtp") and target not in MTP else {}


def slots_per_step(algorithm: str = "none", *, draft_steps: int | None = None, **how: Any) -> int:
    """KV slots that a request reserves for one verify."""
    tokens, topk = how.get("draft_tokens"), how.get("draft_topk")
    shape = shape_of(algorithm, draft_steps, topk, None if tokens == "auto" else tokens)
    return max(shape.tokens + 1, shape.draft_slots)


def fits(drafter: str, target: str, ranks: int = 1) -> bool:
    """Whether a drafter runs with a target: UNO adapts the matrices of dense layers on one device."""
    if not drafter.startswith("uno"):
        return True
    return ranks == 1 and ModelConfig.from_dict(SIZES | (TARGETS | QUANTIZED)[target]).module == llama.__name__


only_quick = False  # whether slow cases are deselected, so that they need not be made


def cases(schedules: tuple[str, ...], graphs: tuple[str, ...]) -> list[Any]:
    """For `parametrize`. Quick: a diagonal with every value of each axis, whose pairs of drafter and target all
    differ, but for drafters that combine what others have. Slow: all combinations, but with both kinds of graphs or
    none."""
    drafters, targets = tuple(SPECULATIONS), tuple(TARGETS)

    def shifted(values: tuple[str, ...], place: int, shift: int) -> str:
        """A cycle through the values that moves on by `shift` after each round."""
        return values[(place + shift * (place // len(values))) % len(values)]

    diagonal = {
        Case(
            shifted(drafters, place, 0),
            shifted(schedules, place, 1),
            shifted(graphs, place, 2),
            shifted(MEMORY, place, 0),
            shifted(targets, place, 1),
        )
        for place in range(max(len(drafters), len(targets)))
    }
    diagonal = {case if fits(case.drafter, case.target) else replace(case, target="llama") for case in diagonal}
    quick = {case for case in diagonal if case.drafter not in REPEATED}
    axes = drafters, schedules, ("eager", "both"), MEMORY, targets
    slow = set() if only_quick else diagonal | {Case(*values) for values in itertools.product(*axes)}
    slow = {case for case in slow if fits(case.drafter, case.target)}
    return [
        *(pytest.param(case, id=str(case)) for case in sorted(quick, key=str)),
        *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in sorted(slow - quick, key=str)),
    ]


def check(case: Case, targets: Targets, patch: pytest.MonkeyPatch, device: str, **settings: Any) -> None:
    """Greedy tokens are those of naive decoding in float64. Sampled ones are the baseline's where drafts are not
    sampled, else those of the drafter run eagerly; and their log probabilities are the target's."""
    if device == "cpu":
        fake_graphs(patch)
    if case.schedule == "v2-late":
        late_results(patch)
    if case.is_auto:
        random_draft_lengths(patch)
    if case.memory == "shared":
        share_always(patch) if device == "cuda" else share_on_cpu(patch)
    engine = _engine(case, targets, device, **settings)
    prompts, count = targets.prompts(case.target), LONGER if case.memory == "tight" or case.is_auto else NEW
    expected = [tokens[:count] for tokens in targets.greedy(case.target, LONGER)]
    assert _tokens(engine.generate(prompts, SamplingParams(max_new_tokens=count, ignore_eos=True))) == expected
    if case.memory == "roomy":  # again, with the prefixes that these left
        assert _tokens(engine.generate(prompts, FEW)) == [tokens[:3] for tokens in expected]
    _check_record(case, engine, targets.checkpoint(case.target).config)

    sampled = engine.generate(prompts, SAMPLED)
    for done, logits in zip(sampled, target_logits(case, targets, sampled), strict=True):
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        assert done.logprobs == pytest.approx(logprobs.tolist(), abs=1e-3)
    # After a retraction or another draft length, verifies start at other positions with other random numbers.
    if case.keeps_seeds or (case.memory == "roomy" and not case.is_auto and not case.has_budget):
        wanted = _sampled(targets, device, case.target, "none" if case.keeps_seeds else case.drafter, **settings)
        differing = sum(one != other for one, other in zip(_tokens(sampled), wanted, strict=True))
        # On a GPU other shapes round differently, and one random number may fall on the other side of a boundary.
        assert differing <= (device == "cuda")


def _engine(case: Case, targets: Targets, device: str, **settings: Any) -> Engine:
    settings = case.settings() | settings
    return targets.engine(case.target, case.drafter, case.schedule[:2], device=device, dtype="float32", **settings)


@cache
def _sampled(targets: Targets, device: str, target: str, drafter: str, **settings: Any) -> list[list[int]]:
    engine = _engine(Case(drafter, "v1", "eager", "roomy", target), targets, device, **settings)
    return _tokens(engine.generate(targets.prompts(target), SAMPLED))


def _check_record(case: Case, engine: Engine, target: ModelConfig) -> None:
    """Checks that the run exercised what the case claims. A target all of whose layers have windows needs no
    retractions where no draft reads more."""
    record, window = engine.record(), target.largest_window
    metrics, graphs = record.metrics, GRAPHS[case.graphs]
    if case.memory == "roomy":
        assert metrics["cached_tokens"]
    if case.memory == "tight" and case.drafter in RETRACTED:
        assert bool(metrics["retractions"]) == (window is None or case.drafter != "none")
    if case.memory == "shared" and engine.parts.caps["shared_prefixes"] == "once" and not target.recurrent_layers:
        assert record.counters["sharing_iterations"]
    assert metrics["graph_coverage"] == (None if case.graphs == "eager" else 1.0)
    for name, counts in record.counters["graphs"].items():
        replayed = graphs.decode if name == "decode" else graphs.prefill
        assert bool(counts["replays"]) == (replayed != "off")
    if case.drafter != "none":
        assert metrics["drafted_tokens"]
    if "corpus" in case.drafter:
        assert metrics["corpus_share"]
    if case.is_auto:
        steps = record.counters["verify_budgets" if case.has_budget else "draft_lengths"]
        assert len({length for row in steps.values() for length in row}) > 1
        assert sum(count for row in steps.values() for count in row.values()) == record.counters["iterations"]
    if engine.device.type == "cuda":
        assert metrics["host_waits_per_step"] == 1.0 if case.schedule == "v1" else record.counters["overlapped"] > 0


def target_logits(case: Case, targets: Targets, done: list[Completion]) -> list[torch.Tensor]:
    """The target's own logits of the tokens of each answer, from a naive pass over its text."""
    texts = [item.prompt_token_ids + item.token_ids for item in done]
    return [
        logits[len(item.prompt_token_ids) - 1 : -1]
        for item, logits in zip(done, targets.logits(case.target, texts), strict=True)
    ]


def _tokens(done: list[Completion]) -> list[list[int]]:
    return [item.token_ids for item in done]
