"""MoE routing: the reference matches plain Python and transformers, the kernels match the reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from crossed import crossed, first_quick

from specbatch.errors import SpecbatchError
from specbatch.kernels.moe.routing import Routing, route_ref
from specbatch.kernels.moe.routing_triton import FEW_TILES, most_blocks, route

RULES = {
    "softmax": Routing(12, 3),
    "all-of-the-sum": Routing(20, 4, normalise=False),
    "one": Routing(5, 1),
    "shared": Routing(12, 3, normalise=False, shared=2, gated=True),
    "every-expert": Routing(4, 4, shared=1),
    "sigmoid": Routing(9, 3, "sigmoid", scale=2.5, bias=torch.linspace(-1, 1, 9), shared=1),
    "groups": Routing(18, 4, "sigmoid", scale=0.5, bias=torch.linspace(1, -1, 18), groups=6, top_groups=2),
    "groups-of-softmax": Routing(12, 3, normalise=False, scale=3.0, groups=4, top_groups=2, shared=2),
    "factors": Routing(12, 3, scale=1.5, factors=torch.linspace(0.5, 2, 12), shared=1),
    "sigmoid-plain": Routing(16, 2, "sigmoid", normalise=False, groups=2, top_groups=2),
}


def on(rule: Routing, device: torch.device) -> Routing:
    bias, factors = (None if part is None else part.to(device) for part in (rule.bias, rule.factors))
    return replace(rule, bias=bias, factors=factors)


def by_hand(row: list[float], rule: Routing) -> list[tuple[int, float]]:
    """(expert, weight) of one token, from the definition."""
    if rule.score == "softmax":
        total = sum(math.exp(x) for x in row[: rule.experts])
        scores = keys = [math.exp(x) / total for x in row[: rule.experts]]
    else:
        scores = [1 / (1 + math.exp(-x)) for x in row[: rule.experts]]
        keys = [s + (0 if rule.bias is None else float(rule.bias[e])) for e, s in enumerate(scores)]
    size = rule.experts // rule.groups
    best = 1 if rule.score == "softmax" else 2
    groups = sorted(range(rule.groups), key=lambda g: -sum(sorted(keys[g * size : (g + 1) * size])[-best:]))
    open_ = [e for e in range(rule.experts) if e // size in groups[: rule.top_groups]]
    chosen = sorted(open_, key=lambda e: (-keys[e], e))[: rule.top_k]
    total = sum(scores[e] for e in chosen) if rule.normalise else 1.0
    gate = 1 / (1 + math.exp(-row[rule.experts])) if rule.gated else 1.0
    always = [(rule.experts + j, gate) for j in range(rule.shared)]
    factors = [1.0] * rule.experts if rule.factors is None else rule.factors.tolist()
    return [(e, scores[e] / total * rule.scale * factors[e]) for e in chosen] + always


@pytest.mark.parametrize("name", RULES)
def test_reference_matches_plain_python(name: str) -> None:
    rule = RULES[name]
    logits = torch.randn(6, rule.logits) * 3
    weights, experts = route_ref(logits, rule)
    assert weights.dtype == torch.float32
    assert experts.dtype == torch.int32
    for row, weight, expert in zip(logits.tolist(), weights, experts, strict=True):
        expected = by_hand(row, rule)
        assert expert.tolist() == [e for e, _ in expected]
        torch.testing.assert_close(weight, torch.tensor([w for _, w in expected]))


@pytest.mark.parametrize("normalise", [True, False])
def test_softmax_routing_matches_transformers(normalise: bool) -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeTopKRouter

    config = Qwen3MoeConfig(hidden_size=16, num_experts=12, num_experts_per_tok=3, norm_topk_prob=normalise)
    router = Qwen3MoeTopKRouter(config)
    torch.nn.init.normal_(router.weight)
    with torch.no_grad():
        logits, weights, experts = router(torch.randn(9, 16))
    ours = route_ref(logits, Routing(12, 3, normalise=normalise))
    assert torch.equal(ours[1].long(), experts)
    torch.testing.assert_close(ours[0], weights)


def test_sigmoid_routing_matches_transformers() -> None:
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHConfig, NemotronHTopkRouter

    config = NemotronHConfig(
        hidden_size=16, n_routed_experts=12, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=2.5
    )
    router = NemotronHTopkRouter(config)
    torch.nn.init.normal_(router.weight)
    router.e_score_correction_bias = torch.randn(12)
    with torch.no_grad():
        logits, weights, experts = router(torch.randn(9, 16))
    rule = Routing(12, 4, "sigmoid", True, 2.5, router.e_score_correction_bias, groups=4, top_groups=2)
    ours, chosen = route_ref(logits, rule)
    order = experts.sort().indices  # transformers leaves them in no order
    back = chosen.long().sort().indices
    assert torch.equal(chosen.long().gather(1, back), experts.gather(1, order))
    torch.testing.assert_close(ours.gather(1, back), weights.gather(1, order))


@pytest.mark.parametrize(("name", "tokens"), crossed(RULES, [1, 7, 16, 45]))
def test_kernel_matches_reference(name: str, tokens: int, device: torch.device) -> None:
    rule = on(RULES[name], device)
    buffer = torch.full((tokens, rule.logits + 3), torch.inf, device=device)
    logits = buffer[:, 1 : 1 + rule.logits].copy_(torch.randn(tokens, rule.logits) * 3)
    check(logits, rule, 16)


def check(logits: torch.Tensor, rule: Routing, rows: int, few_tiles: int = FEW_TILES) -> None:
    """Routing and block plan match the reference, and a second run is bit-identical."""
    tokens = len(logits)
    weights, experts, plan = route(logits, rule, rows, few_tiles)
    expected, chosen = route_ref(logits, rule)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    order = chosen.flatten().sort(stable=True)
    assert torch.equal(plan.order.long(), order.indices)
    used = int(plan.used)
    assert used <= len(plan.blocks) == most_blocks(tokens, rule, rows)
    covered = []
    for expert, first, end in plan.blocks[:used].tolist():
        assert 0 < end - first <= rows
        assert (order.values[first:end] == expert).all()
        covered += range(first, end)
    assert sorted(covered) == list(range(tokens * rule.width))
    counts = torch.bincount(order.values, minlength=1).tolist()
    assert used == sum(-(-count // rows) for count in counts)
    again = route(logits, rule, rows)
    assert torch.equal(again[0], weights)
    assert torch.equal(again[1], experts)
    assert torch.equal(again[2].order, plan.order)
    assert torch.equal(again[2].blocks[:used], plan.blocks[:used])


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_logits_of_every_type(score: str, dtype: torch.dtype, tokens: int, device: torch.device) -> None:
    """Of 300 experts, more than a warp reads at once, with infinite, equal and denormal logits."""
    rule = Routing(300, 6, score, scale=0.5, shared=1, gated=True)  # type: ignore[arg-type]
    logits = torch.randn(tokens, rule.logits, device=device).to(dtype) * 3
    logits[0] = -logits[0].abs()
    logits[1] = (torch.arange(rule.logits, device=device) % 7 - 3) * torch.finfo(dtype).smallest_normal / 4
    logits[2, :290] = -torch.inf
    check(logits, rule, 16)


@pytest.mark.parametrize(("tokens", "few"), first_quick(2, [(45, FEW_TILES), (45, 1), (530, FEW_TILES)]))
def test_counts_are_summed_in_either_kernel(tokens: int, few: int, device: torch.device) -> None:
    rule = Routing(12, 3, shared=1)
    check(torch.randn(tokens, rule.logits, device=device), rule, 32, few)


@pytest.mark.parametrize(("tokens", "rows"), [(40, 16), (40, 32), (5, 64)])
def test_all_tokens_to_one_expert(tokens: int, rows: int, device: torch.device) -> None:
    logits = torch.zeros(tokens, 7, device=device)
    logits[:, 5] = 9
    check(logits, Routing(7, 1, shared=1), rows)


def test_block_count_reaches_its_bound(device: torch.device) -> None:
    """One row more than full blocks of 16 for every expert."""
    logits = torch.eye(3, device=device).repeat(17, 1) * 5
    assert int(route(logits, Routing(3, 1), 16)[2].used) == most_blocks(51, Routing(3, 1), 16) == 6


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_ties_select_the_lower_expert_id(score: str, tokens: int, device: torch.device) -> None:
    rule = Routing(11, 4, score, groups=1)  # type: ignore[arg-type]
    logits = torch.randint(-1, 2, (tokens, 11), device=device).half()
    logits[0] = 0
    logits[1] = -0.0
    logits[1, ::2] = 0.0
    check(logits, rule, 16)
    assert route(logits, rule, 16)[1][:2].tolist() == [[0, 1, 2, 3]] * 2


def test_garbage_logits_select_valid_experts(device: torch.device) -> None:
    """Padding rows hold arbitrary logits, and the experts that they select are read."""
    for rule in (Routing(6, 3), on(RULES["groups"], device)):
        logits = torch.tensor([torch.nan, torch.inf, -torch.inf], device=device)[:, None].repeat(1, rule.logits)
        _, experts, plan = route(logits, rule, 16)
        for row in experts.tolist():
            assert len(set(row)) == rule.top_k
            assert set(row) <= set(range(rule.experts))
        assert sorted(plan.order.tolist()) == list(range(3 * rule.width))


@pytest.mark.parametrize("tokens", [4, 20])
@pytest.mark.parametrize("name", ["softmax", "groups", "sigmoid-plain"])
def test_nan_logits_propagate(name: str, tokens: int, device: torch.device) -> None:
    """One NaN logit: its expert is selected, from any group, with a NaN weight."""
    rule, logits = on(RULES[name], device), torch.randn(tokens, RULES[name].logits, device=device)
    broken = [(token, (5 * token + 3) % rule.experts) for token in range(0, tokens, 2)]
    for token, expert in broken:
        logits[token, expert] = torch.nan
    weights, experts, _ = route(logits, rule, 16)
    expected, chosen = route_ref(logits, rule)
    assert torch.equal(experts, chosen)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    for token, expert in broken:
        assert weights[token][experts[token] == expert].isnan().all()
        assert expert in experts[token]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": 0}, "num_experts_per_tok=0: use 1 to 12"),
        ({"top_k": 5, "score": "sigmoid", "groups": 3}, "num_experts_per_tok=5: use 1 to 4"),
        ({"groups": 5, "score": "sigmoid"}, "n_group=5: use a divisor of the 12"),
        ({"groups": 12, "score": "sigmoid"}, "n_group=12: a group needs at least 2 experts"),
        ({"groups": 3, "top_groups": 4, "score": "sigmoid"}, "topk_group=4: use 1 to 3"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SpecbatchError, match=message):
        Routing(**{"experts": 12, "top_k": 2, **settings})  # type: ignore[arg-type]
