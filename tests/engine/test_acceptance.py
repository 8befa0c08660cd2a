"""Losslessness of the acceptance rules: exact enumeration over lattices of coins, chi-square with the real coins, and
mutants of the rules that both must catch. Greedy verification against a plain loop."""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from crossed import first_quick
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specbatch.core import sampling as sampling_module
from specbatch.core.sampling import Sampling, SamplingFlags
from specbatch.core.step_input import Proposal
from specbatch.engine import acceptance
from specbatch.engine.acceptance import RefResult, accept_ref, logprobs_of
from specbatch.kernels.sampling.rng import ACCEPT, DRAFT, RESIDUAL, TARGET, uniform_ref
from specbatch.kernels.sampling.sample import sample_ref

Verify = Callable[[torch.Tensor, Proposal, torch.Tensor, Any], RefResult]
P_VALUE = 1e-4
LARGEST_COIN = 1 - 2.0**-53


def sampling_of(rows: int, temperature: float = 1.0, **changes: Any) -> Sampling:
    """Parameters of `rows` rows, seeds counting up; a list or tensor gives one value per row."""
    values = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    tensors = {name: torch.as_tensor(values[name]).expand(rows) for name in ("temperature", "top_k", "top_p", "min_p")}
    return Sampling(
        **tensors,
        seeds=torch.as_tensor(values.get("seeds", torch.arange(rows))),
        flags=SamplingFlags(
            sampled=values.get("sampled", bool((tensors["temperature"] > 0).any())),
            truncated=bool(((tensors["top_k"] > 0) | (tensors["top_p"] < 1) | (tensors["min_p"] > 0)).any()),
            logprobs=values.get("logprobs", False),
        ),
    )


def mutant(old: str, new: str) -> Verify:
    """`accept_ref` with one piece of its module's text replaced."""
    source = inspect.getsource(acceptance)
    assert source.count(old) == 1, f"the rule no longer says {old!r}: bring this mutant up to date"
    module: dict[str, Any] = {"__name__": "mutant"}
    exec(source.replace(old, new), module)
    changed: Verify = module["accept_ref"]
    return changed


MUTANTS = {
    "bonus from the row before": ("at = accepted[:, None, None]", "at = (accepted - 1).clamp(min=0)[:, None, None]"),
    "bonus from the last row": ("p_next = p.gather(1, at.expand(-1, 1, p.shape[-1]))[:, 0]", "p_next = p[:, -1]"),
    "nothing subtracted": ("residual = (p_next - q_next).clamp(min=0)", "residual = p_next"),
    "always accepted": ("u * drafts_q < drafts_p", "drafts_p > 0"),
    "accepted by p alone": ("u * drafts_q < drafts_p", "u < drafts_p"),
    "q at another temperature": ("drafts_q = q.gather", "drafts_q = (q.sqrt() / q.sqrt().sum(-1, True)).gather"),
    "one coin to accept and to draw": ("[:, None]), RESIDUAL)", "[:, None]), ACCEPT)"),
    "drafted ignored": ("correct & (place < drafted[:, None])", "correct"),
    "subtracted behind the last draft": ("torch.where((accepted < proposal.drafted)[:, None], q_next, 0.0)", "q_next"),
}


# -- exact enumeration ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lattice(Sampling):
    """Takes laws for logits, and its coins from a grid: `grid[stream]` is [B, N], of positions 1..N."""

    grid: dict[int, torch.Tensor]

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def uniform(self, positions: torch.Tensor, stream: int) -> torch.Tensor:
        return self.grid[stream].gather(1, positions - 1)


def lattice_of(grid: dict[int, torch.Tensor]) -> Lattice:
    plain = sampling_of(1)
    return Lattice(**{name: getattr(plain, name) for name in plain.__dataclass_fields__}, grid=grid)


@dataclass(frozen=True)
class Toy:
    """A target and a draft whose laws are whole multiples of 1 / units, different after every prefix.

    Every threshold and every partial sum that a rule can meet is then a fraction with a denominator up to `units`:
    the midpoints of a lattice of lcm(1..units) cells stand for all coins, and counting them integrates exactly.
    """

    seed: int
    vocabulary: int
    units: int

    @property
    def cells(self) -> int:
        return math.lcm(*range(1, self.units + 1))

    def target(self, prefix: tuple[int, ...]) -> list[float]:
        return random_law(self, "target", prefix)

    def draft(self, prefix: tuple[int, ...]) -> list[float]:
        """Every fourth law is the target's own."""
        agrees = random.Random(f"{self.seed} {prefix}").random() < 0.25
        return random_law(self, "target" if agrees else "draft", prefix)

    def chance(self, tokens: tuple[int, ...]) -> float:
        """Of a sequence under the target."""
        return math.prod(self.target(tokens[:place])[token] for place, token in enumerate(tokens))

    def runs(self, rule: Verify, drafts: Sequence[int], drafted: int, sampled: bool) -> dict[tuple[int, ...], float]:
        """Chance of each emitted run for one chain of drafts, over all coins."""
        rows = len(drafts) + 1
        midpoints = (torch.arange(self.cells, dtype=torch.float64) + 0.5) / self.cells
        coins = torch.cartesian_prod(*[midpoints] * rows).view(-1, rows)
        # A verify draws once from what is left: that coin may be the same at all positions.
        sampling = lattice_of({TARGET: coins, ACCEPT: coins, RESIDUAL: coins[:, -1:].expand_as(coins)})
        prefixes = [tuple(drafts[:place]) for place in range(rows)]
        p = torch.tensor([self.target(prefix) for prefix in prefixes], dtype=torch.float64)
        q = torch.tensor([self.draft(prefix) for prefix in prefixes[:-1]], dtype=torch.float64)
        count = len(coins)
        verdict = rule(
            p.expand(count, -1, -1),
            Proposal(
                torch.tensor(drafts).expand(count, -1),
                torch.full((count,), drafted),
                q.expand(count, -1, -1) if sampled else None,
            ),
            torch.arange(1, rows + 1).expand(count, -1),
            sampling,
        )
        assert verdict.accepted.max() <= rows - 1
        digits = torch.where(torch.arange(rows) > verdict.accepted[:, None], 0, verdict.tokens + 1)
        base = self.vocabulary + 1
        counts = (digits * base ** torch.arange(rows)).sum(-1).bincount()
        return {
            tuple(digit - 1 for place in range(rows) if (digit := code // base**place % base)): share / count
            for code, share in enumerate(counts.tolist())
            if share
        }

    def error(self, law: dict[tuple[int, ...], float], length: int) -> float:
        """Largest difference to the target's law of `length` tokens, when runs are continued by plain sampling."""
        whole: dict[tuple[int, ...], float] = defaultdict(float)
        for run, chance in law.items():
            for rest in itertools.product(range(self.vocabulary), repeat=length - len(run)):
                tokens = run + rest
                whole[tokens] += chance * (self.chance(tokens) / self.chance(run) if self.chance(run) else 1.0)
        return max(
            abs(whole[tokens] - self.chance(tokens))
            for tokens in itertools.product(range(self.vocabulary), repeat=length)
        )

    def error_of_sampled_drafts(self, rule: Verify, count: int, drafted: int) -> float:
        """`count` drafts from the draft's law; those from `drafted` on do not count, and are no draw from it."""
        law: dict[tuple[int, ...], float] = defaultdict(float)
        for drawn in itertools.product(range(self.vocabulary), repeat=drafted):
            chance = math.prod(self.draft(drawn[:place])[token] for place, token in enumerate(drawn))
            if chance:
                drafts = drawn + (self.seed % self.vocabulary,) * (count - drafted)
                for run, share in self.runs(rule, drafts, drafted, sampled=True).items():
                    law[run] += chance * share
        return self.error(law, count + 1)


@cache
def random_law(toy: Toy, kind: str, prefix: tuple[int, ...]) -> list[float]:
    randomness = random.Random(f"{toy.seed} {kind} {prefix}")
    parts = [randomness.randrange(toy.vocabulary) for _ in range(toy.units)]
    return [parts.count(token) / toy.units for token in range(toy.vocabulary)]


@pytest.mark.parametrize(
    ("toy", "count"),
    [
        *first_quick(2, ((Toy(seed, 5, 4), 2) for seed in range(8))),
        *first_quick(2, ((Toy(seed, 8, 6), 1) for seed in range(8))),
        *first_quick(1, [(Toy(0, 4, 5), 2), (Toy(0, 5, 4), 3), (Toy(1, 6, 3), 3)]),
    ],
    ids=str,
)
def test_sampled_drafts_are_lossless(toy: Toy, count: int) -> None:
    for drafted in range(count + 1):
        assert toy.error_of_sampled_drafts(accept_ref, count, drafted) < 1e-12, f"{drafted} drafted"


@pytest.mark.parametrize(
    ("toy", "count"), [(Toy(seed, 5, 4), 2) for seed in range(4)] + [(Toy(0, 5, 3), 3), (Toy(1, 8, 6), 1)], ids=str
)
def test_any_deterministic_draft_is_lossless(toy: Toy, count: int) -> None:
    for drafts in itertools.product(range(toy.vocabulary), repeat=count):
        drafted = sum(drafts) % (count + 1)
        assert toy.error(toy.runs(accept_ref, drafts, drafted, sampled=False), count + 1) < 1e-12, drafts


@pytest.mark.parametrize("name", first_quick(3, MUTANTS))
def test_enumeration_catches_a_wrong_rejection_rule(name: str) -> None:
    rule = mutant(*MUTANTS[name])
    errors = [Toy(seed, 5, 4).error_of_sampled_drafts(rule, 2, drafted) for seed in (4, 5) for drafted in (1, 2)]
    assert max(errors) > 1e-3


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sample(logits, positions, TARGET)", "sample(logits, positions[:, :1].expand_as(positions), TARGET)"),
        ("sample(logits, positions, TARGET)", "sample(logits.roll(1, 1), positions, TARGET)"),
        ("tokens[:, :-1] == proposal.tokens", "tokens[:, 1:] == proposal.tokens"),
        ("tokens[:, :-1] == proposal.tokens", "logits[:, :-1].argmax(-1) == proposal.tokens"),
        (".long().cumprod(-1).sum(-1)", ".long().sum(-1)"),
    ],
    ids=["one coin for all rows", "row before", "draft of the next row", "accept the argmax", "accept behind an error"],
)
def test_enumeration_catches_a_wrong_deterministic_rule(old: str, new: str) -> None:
    rule, toy = mutant(old, new), Toy(0, 5, 4)
    chains = itertools.product(range(toy.vocabulary), repeat=2)
    assert max(toy.error(toy.runs(rule, drafts, 2, sampled=False), 3) for drafts in chains) > 1e-3


# -- coins at the ends of their range -------------------------------------------------------------------------


def emits_the_impossible(rule: Verify, coin: float) -> bool:
    """Does any emitted token have probability 0 when every coin has this one value?"""
    p = torch.tensor([[0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.25, 0.75, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.0, 0.5, 0.25, 0.25]], dtype=torch.float64)
    chains = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    coins = torch.full((16, 3), coin, dtype=torch.float64)
    sampling = lattice_of({TARGET: coins, ACCEPT: coins, RESIDUAL: coins})
    drafted = torch.full((16,), 2)
    for law in (q.expand(16, -1, -1), None):
        verdict = rule(
            p.expand(16, -1, -1), Proposal(chains, drafted, law), torch.arange(1, 4).expand(16, -1), sampling
        )
        emitted = torch.arange(3) <= verdict.accepted[:, None]
        if (emitted & (p.expand(16, -1, -1).gather(-1, verdict.tokens[..., None])[..., 0] == 0)).any():
            return True
    return False


def test_no_coin_lets_an_impossible_token_through() -> None:
    assert not emits_the_impossible(accept_ref, 0.0)
    assert not emits_the_impossible(accept_ref, LARGEST_COIN)


def test_what_lets_an_impossible_token_through_is_seen() -> None:
    assert emits_the_impossible(mutant("u * drafts_q < drafts_p", "u * drafts_q <= drafts_p"), 0.0)
    assert emits_the_impossible(accept_ref, 1.0), "a coin of exactly 1 is none that the rules can take"


def test_where_rounding_leaves_nothing_to_draw_from_the_target_itself_is_the_law() -> None:
    q = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)
    p = q * (1 - 2.0**-20)
    coins = torch.tensor([[LARGEST_COIN, 0.0]] * 2 + [[LARGEST_COIN, 0.9]] * 2, dtype=torch.float64)
    sampling = lattice_of({ACCEPT: coins, RESIDUAL: coins.flip(1)})
    proposal = Proposal(torch.tensor([[1], [2], [1], [2]]), torch.ones(4, dtype=torch.int64), q.expand(4, 1, 3))
    verdict = accept_ref(p.expand(4, 2, 3), proposal, torch.tensor([[1, 2]] * 4), sampling)
    assert verdict.accepted.tolist() == [0] * 4
    assert verdict.tokens[:, 0].tolist() == [1, 1, 2, 2]


def test_a_draft_from_the_target_itself_is_always_accepted() -> None:
    logits = torch.randn(4000, 3, 7, generator=torch.Generator().manual_seed(0))
    sampling = sampling_of(4000, 0.8, top_p=0.9)
    positions = torch.arange(9, 12).expand(4000, -1)
    q = sampling.probabilities(logits[:, :2])
    drafts = sample_ref(q, sampling.uniform(positions[:, :2], DRAFT))
    verdict = accept_ref(logits, Proposal(drafts, torch.full((4000,), 2), q), positions, sampling)
    assert verdict.accepted.tolist() == [2] * 4000
    assert torch.equal(verdict.tokens[:, :2], drafts)


# -- chi-square on the real path ------------------------------------------------------------------------------

VOCABULARY = 6
DRAFTS = 3
# Tables of logits after the last two tokens: states () , (a), (a, b) in this order.
STATES = 1 + VOCABULARY + VOCABULARY**2


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Target and draft logits [STATES, VOCABULARY]: with impossible tokens in either, and states where they agree."""
    generator = torch.Generator().manual_seed(8)
    target, draft = (torch.randn(STATES, VOCABULARY, generator=generator) * 1.5 for _ in range(2))
    target[1::3, 2], target[::4, 5] = -torch.inf, -torch.inf
    draft[1::4, 0], draft[::3, 5] = -torch.inf, -torch.inf
    draft[2::5] = target[2::5]
    return target, draft


TARGET_LOGITS, DRAFT_LOGITS = tables()


def after(state: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    newest = torch.where(state == 0, -1, (state - 1) % VOCABULARY)  # the last token of (a) and of (a, b) alike
    return 1 + torch.where(newest < 0, token, VOCABULARY * (newest + 1) + token)


def generate(
    rule: Verify, sampling: Sampling, *, drafted: str, mix: Callable[[torch.Tensor], torch.Tensor] = lambda law: law
) -> torch.Tensor:
    """The first three tokens of each row, by three iterations on the path that engines take.

    drafted: "law" (sampled drafts), "argmax" (deterministic ones) or "nothing". `mix` changes the q that is told.
    """
    rows = len(sampling.seeds)
    every = torch.arange(rows)
    lengths = torch.full((rows,), 10)
    states = torch.zeros(rows, dtype=torch.int64)
    out = torch.zeros(rows, 3 * (DRAFTS + 1), dtype=torch.int64)
    for step in range(3):
        at, logits, drafts, laws = states, [TARGET_LOGITS[states]], [], []
        for index in range(0 if drafted == "nothing" else DRAFTS):
            if drafted == "law":
                law = sampling.probabilities(DRAFT_LOGITS[at][:, None])
                laws.append(mix(law))
                drafts.append(sample_ref(law, sampling.uniform(lengths[:, None] + 1 + index, DRAFT)))
            else:
                drafts.append(DRAFT_LOGITS[at].argmax(-1, keepdim=True))
            at = after(at, drafts[-1][:, 0])
            logits.append(TARGET_LOGITS[at])
        # How many of them count changes from row to row and from step to step.
        counting = (sampling.seeds // 7 + step) % (DRAFTS + 1) if drafts else torch.zeros_like(every)
        proposal = Proposal(
            torch.cat(drafts, 1) if drafts else every.new_empty(rows, 0), counting, torch.cat(laws, 1) if laws else None
        )
        predicted = lengths[:, None] + torch.arange(1, len(logits) + 1)
        verdict = rule(torch.stack(logits, 1), proposal, predicted, sampling)
        out[every[:, None], predicted - 11] = verdict.tokens
        for index in range(len(logits)):
            states = torch.where(index <= verdict.accepted, after(states, verdict.tokens[:, index]), states)
        lengths = lengths + verdict.accepted + 1
        assert verdict.finite.all()
        assert rule is not accept_ref or (verdict.accepted <= counting).all()
    return out[:, :3]


def target_law(temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The law of three tokens [V, V, V] in float64, truncated the plain way."""
    laws = []
    for row in TARGET_LOGITS.double().numpy():
        order = np.argsort(-row, kind="stable")
        p = np.exp((row[order] - row[order[0]]) / (temperature or 1e-3))
        if top_k:
            p[top_k:] = 0
        p /= p.sum()
        keep = (np.cumsum(p) - p < top_p) & (p >= min_p * p[0])
        keep[0] = True
        law = np.zeros(VOCABULARY)
        law[order] = p * keep
        laws.append(law / law.sum())
    first, pairs = laws[0], np.array(laws[1 : 1 + VOCABULARY])
    triples = np.array(laws[1 + VOCABULARY :]).reshape((VOCABULARY,) * 3)
    return first[:, None, None] * pairs[:, :, None] * triples


def verdict_of_chi_square(tokens: torch.Tensor, law: np.ndarray) -> tuple[float, float]:
    """Smallest p-value over first tokens, pairs and triples, and the total variation distance of triples as a multiple
    of what so many draws from the law itself show on average."""
    worst, ratio = 1.0, 0.0
    for width in (1, 2, 3):
        code = sum(tokens[:, place] * VOCABULARY ** (width - 1 - place) for place in range(width))
        assert isinstance(code, torch.Tensor)
        counts = torch.bincount(code, minlength=VOCABULARY**width).numpy()
        expected = law.sum(axis=tuple(range(width, 3))).flatten() * len(tokens)
        if counts[expected == 0].any():
            return 0.0, math.inf
        rare = expected < 5  # pooled: the statistic is not chi-square in such cells
        observed = np.append(counts[~rare], counts[rare].sum())
        wanted = np.append(expected[~rare], expected[rare].sum())
        if wanted[-1] < 5:
            observed, wanted = observed[:-1], wanted[:-1] * observed[:-1].sum() / wanted[:-1].sum()
        if len(wanted) > 1:
            worst = min(worst, float(stats.chisquare(observed, wanted).pvalue))
        typical = np.sqrt(expected * (1 - expected / len(tokens)) * 2 / math.pi).sum()
        ratio = float(np.abs(counts - expected).sum() / max(typical, 1))
    return worst, ratio


# temperature, top_k, top_p, min_p
SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.6, 3, 1.0, 0.0),
    (1.4, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.2),
    (0.9, 4, 0.9, 0.1),
    (0.0, 0, 1.0, 0.0),
]


@pytest.mark.parametrize("drafted", first_quick(1, ["law", "argmax", "nothing"]))
def test_tokens_follow_the_target_in_a_batch_of_all_settings(drafted: str) -> None:
    rows = 20_000 * len(SETTINGS)
    columns = zip(*SETTINGS, strict=True)
    names = ("temperature", "top_k", "top_p", "min_p")
    sampling = sampling_of(
        rows, **{name: torch.tensor(column).repeat(20_000) for name, column in zip(names, columns, strict=True)}
    )
    tokens = generate(accept_ref, sampling, drafted=drafted)
    for index, setting in enumerate(SETTINGS):
        worst, ratio = verdict_of_chi_square(tokens[index :: len(SETTINGS)], target_law(*setting))
        assert worst > P_VALUE, setting
        assert ratio < 1.5, setting


@pytest.mark.parametrize("drafted", first_quick(1, ["law", "argmax"]))
def test_tokens_follow_the_target_over_many_seeds(drafted: str) -> None:
    worst, ratio = verdict_of_chi_square(
        generate(accept_ref, sampling_of(120_000), drafted=drafted), target_law(1.0, 0, 1.0, 0.0)
    )
    assert worst > P_VALUE
    assert ratio < 1.5


@pytest.mark.parametrize("name", first_quick(3, MUTANTS))
def test_chi_square_catches_a_wrong_rejection_rule(name: str) -> None:
    tokens = generate(mutant(*MUTANTS[name]), sampling_of(30_000), drafted="law")
    worst, ratio = verdict_of_chi_square(tokens, target_law(1.0, 0, 1.0, 0.0))
    assert worst < 1e-6
    assert ratio > 1.5


def test_chi_square_catches_a_q_that_the_drafts_were_not_drawn_from() -> None:
    tokens = generate(
        accept_ref, sampling_of(60_000), drafted="law", mix=lambda law: law.sqrt() / law.sqrt().sum(-1, keepdim=True)
    )
    assert verdict_of_chi_square(tokens, target_law(1.0, 0, 1.0, 0.0))[0] < 1e-6


@pytest.mark.parametrize(
    "source",
    first_quick(
        2,
        [
            lambda seeds, positions, stream: uniform_ref(seeds, positions, TARGET),
            lambda seeds, positions, stream: uniform_ref(seeds, positions * 0, stream),
            lambda seeds, positions, stream: uniform_ref(seeds, positions // 2, stream),
            lambda seeds, positions, stream: uniform_ref(seeds // 1000, positions, stream),
            lambda seeds, positions, stream: uniform_ref(seeds, positions, stream) ** 1.02,
        ],
    ),
    ids=["one stream", "position ignored", "a coin for two positions", "seeds shared", "not uniform"],
)
def test_chi_square_catches_wrong_coins(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_module, "uniform_ref", source)
    tokens = generate(accept_ref, sampling_of(60_000), drafted="law")
    assert verdict_of_chi_square(tokens, target_law(1.0, 0, 1.0, 0.0))[0] < 1e-6


def test_deterministic_drafts_leave_the_tokens_of_a_seed_as_they_are() -> None:
    sampling = sampling_of(5000, torch.arange(5000) % 5 / 3, top_k=torch.arange(5000) % 4)
    plain = generate(accept_ref, sampling, drafted="nothing")
    assert torch.equal(generate(accept_ref, sampling, drafted="argmax"), plain)


@pytest.mark.parametrize("drafted", ["law", "argmax"])
def test_a_row_does_not_feel_its_neighbours(drafted: str) -> None:
    """Tokens depend on a row's own seed and settings, not on its place or on who else is in the batch."""
    temperature, top_k = torch.arange(600) % 4 / 3, torch.arange(600) % 3
    together = generate(accept_ref, sampling_of(600, temperature, top_k=top_k), drafted=drafted)
    for part in (torch.arange(0, 600, 12), torch.arange(7, 600, 24).flip(0), torch.tensor([4]), torch.tensor([5])):
        alone = sampling_of(len(part), temperature[part], top_k=top_k[part], seeds=part)
        assert torch.equal(generate(accept_ref, alone, drafted=drafted), together[part])


# -- greedy ---------------------------------------------------------------------------------------------------


def greedy(logits: list[list[float]], drafts: list[int], drafted: int) -> list[int]:
    """What one row emits: the drafts that are the argmax (the lowest of equals) and one token more."""
    emitted = []
    for place, row in enumerate(logits):
        emitted.append(row.index(max(row)))
        if place == drafted or emitted[-1] != drafts[place]:
            break
    return emitted


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[list[float]]], list[list[int]], list[int]]:
    rows, count, vocabulary = draw(st.integers(1, 4)), draw(st.integers(0, 4)), draw(st.integers(1, 4))
    logit = st.integers(-2, 2).map(float) | st.just(-math.inf)
    row = st.lists(logit, min_size=vocabulary, max_size=vocabulary).filter(lambda values: max(values) > -math.inf)
    logits = draw(st.lists(st.lists(row, min_size=count + 1, max_size=count + 1), min_size=rows, max_size=rows))
    drafts = [
        [draw(st.sampled_from([values.index(max(values))] * 3 + list(range(vocabulary)))) for values in chain[:-1]]
        for chain in logits
    ]
    return logits, drafts, [draw(st.integers(0, count)) for _ in range(rows)]


def one_hot(drafts: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(drafts, vocabulary).float()


@settings(deadline=None, derandomize=True, max_examples=50)
@given(case=batches(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_greedy_is_a_plain_loop(
    case: tuple[list[list[list[float]]], list[list[int]], list[int]], dtype: torch.dtype
) -> None:
    listed, chains, counting = case
    logits, drafted = torch.tensor(listed, dtype=dtype), torch.tensor(counting)
    drafts = torch.tensor(chains, dtype=torch.int64).view(len(chains), -1)
    positions = torch.arange(logits.shape[1]).expand(len(listed), -1) + 5
    sampling = sampling_of(len(listed), 0.0)
    verdicts = [accept_ref(logits, Proposal(drafts, drafted), positions, sampling)]
    # The same among rows that are sampled, with deterministic drafts and with one-hot laws.
    mixed = replace(sampling, flags=SamplingFlags(sampled=True))
    verdicts.append(accept_ref(logits, Proposal(drafts, drafted), positions, mixed))
    if drafts.shape[1]:
        verdicts.append(
            accept_ref(logits, Proposal(drafts, drafted, one_hot(drafts, logits.shape[2])), positions, mixed)
        )
    for verdict in verdicts:
        assert verdict.finite.all()
        for row in range(len(listed)):
            expected = greedy(listed[row], chains[row], counting[row])
            assert verdict.accepted[row] == len(expected) - 1
            assert verdict.tokens[row, : len(expected)].tolist() == expected


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("with_law", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_flagged(
    bad: float, dtype: torch.dtype, with_law: bool, temperature: float
) -> None:
    """Wherever they stand in the rows of a verify; and neither that row nor another one stops the batch."""
    places = list(itertools.product(range(3), (0, 4, 8)))
    logits = torch.randn(len(places) + 1, 3, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    clean = logits.clone()
    for row, (place, token) in enumerate(places):
        logits[row, place, token] = bad
    drafts = clean[:, :2].argmax(-1)
    proposal = Proposal(
        drafts, torch.full((len(logits),), 2), one_hot(drafts, 9) if with_law and temperature > 0 else None
    )
    positions, sampling = torch.arange(3).expand(len(logits), -1), sampling_of(len(logits), temperature)
    verdict = accept_ref(logits, proposal, positions, sampling)
    assert verdict.finite.tolist() == [False] * len(places) + [True]
    assert ((verdict.tokens >= 0) & (verdict.tokens < 9)).all()
    whole = accept_ref(clean, proposal, positions, sampling)
    assert whole.finite.all()
    assert verdict.accepted[-1] == whole.accepted[-1]
    assert torch.equal(verdict.tokens[-1], whole.tokens[-1])


@pytest.mark.parametrize("drafted", ["law", "argmax"])
def test_logprobs_are_the_models_own(drafted: str) -> None:
    """Before temperature and truncation, of every token that is emitted."""
    logits = torch.randn(50, 4, 30, generator=torch.Generator().manual_seed(3)) * 3
    sampling = sampling_of(50, 0.5, top_k=10, logprobs=True)
    positions = torch.arange(4).expand(50, -1)
    laws = sampling.probabilities(logits[:, :3])
    drafts = sample_ref(laws, sampling.uniform(positions[:, :3], DRAFT)) if drafted == "law" else laws.argmax(-1)
    proposal = Proposal(drafts, torch.full((50,), 3), laws if drafted == "law" else None)
    verdict = accept_ref(logits, proposal, positions, sampling)
    logprobs = logprobs_of(logits, verdict.tokens)
    assert logprobs.dtype == torch.float32
    wanted = logits.double().log_softmax(-1).gather(-1, verdict.tokens[..., None])[..., 0]
    torch.testing.assert_close(logprobs.double(), wanted, rtol=0, atol=1e-5)
