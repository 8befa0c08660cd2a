"""Drafts of requests with a grammar: exact enumeration of how they are chosen and of what a verify then emits."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import regex
import torch
from crossed import first_quick
from exact_acceptance import Lattice, Text, Toy, lattice_of, sampling_of

from specbatch.core.device_batch import DeviceBatch
from specbatch.core.logit_adjustments import Adjustments
from specbatch.core.sampling import SamplingFlags
from specbatch.core.step_input import Proposal, StepInput
from specbatch.core.token_constraint import Constraint, HostMasks
from specbatch.drafters.choose import DraftChain, allowed_drafts, choose_at_once, draft_states
from specbatch.engine.device.acceptance import accept_ref
from specbatch.grammar.host_matcher import HostVocabulary, masks
from specbatch.grammar.regex import compile_regex
from specbatch.grammar.token_automaton import FREE, compile_tokens
from specbatch.kernels.sampling.rng import ACCEPT, DRAFT, RESIDUAL

LETTERS, END = "abcd", 4
EXPRESSION = "(?:ab|b[ac]|c[cd]{1,2})*"
DRAFTS = 2
ON_HOST = HostVocabulary([letter.encode() for letter in LETTERS], {END}, len(LETTERS) + 1).compile(
    f'%llguidance {{"no_forcing": true}}\nstart: /{EXPRESSION}/'
)
AUTOMATON = compile_tokens(compile_regex(EXPRESSION), [letter.encode() for letter in LETTERS], {END}, len(LETTERS) + 1)


@cache
def allowed(prefix: Text) -> set[int]:
    """Tokens that may follow; all of them after an end, and after what the grammar does not allow."""
    if END in prefix:
        return set(range(END + 1))
    text = "".join(LETTERS[token] for token in prefix)
    found = {token for token in range(END) if regex.fullmatch(EXPRESSION, text + LETTERS[token], partial=True)}
    found |= {END} if regex.fullmatch(EXPRESSION, text) else set()
    return found or set(range(END + 1))


def restricted(p: list[float], prefix: Text) -> list[float]:
    """The distribution among tokens that may follow; the first of them where it has none."""
    kept = [share if token in allowed(prefix) else 0.0 for token, share in enumerate(p)]
    if not any(kept):
        return [float(token == min(allowed(prefix))) for token in range(len(p))]
    return [share / math.fsum(kept) for share in kept]


class Restricted(Toy):
    """Target and draft that know the grammar."""

    def target(self, prefix: Text) -> list[float]:
        return restricted(super().target(prefix), prefix)

    def draft(self, prefix: Text) -> list[float]:
        return restricted(super().draft(prefix), prefix)


class Weights(Lattice):
    """Uses logits as weights; where none is positive the largest is chosen."""

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        weights = logits.clamp(min=0)
        weights = torch.where(weights.sum(-1, True) > 0, weights, (logits.argmax(-1, True) == torch.arange(5)).double())
        return weights / weights.sum(-1, True)


def step_of(sampling: Any, rows: int, *, is_free: torch.Tensor | None = None) -> StepInput:
    """A step of requests at the beginning of their answers, all with the grammar but those that are free."""
    states = torch.zeros(rows, dtype=torch.int64)
    if is_free is not None:
        states[is_free] = FREE
    cells = torch.cat([torch.full((3,), 9), torch.from_numpy(AUTOMATON.cells).long()]).short()
    grammars = torch.tensor([[3, 3 + AUTOMATON.classes.size, AUTOMATON.row]]).expand(rows, -1).contiguous()
    adjustments = Adjustments(None, None, None, torch.zeros(rows), None, Constraint(cells, grammars, states))
    batch = DeviceBatch(rows, 4, 1, torch.device("cpu"))
    lengths = torch.zeros(rows, dtype=torch.int64)
    return StepInput(batch, torch.arange(rows) + 1, lengths, DRAFTS, 1, 4, replace(sampling, adjustments=adjustments))


def masked_on_host(toy: Toy, drafts: Text) -> torch.Tensor:
    """The target's distributions float64 [DRAFTS + 1, V] at the root and after drafts, with masks of llguidance."""
    matcher = ON_HOST.matcher()
    bits = torch.from_numpy(masks([matcher], [list(drafts)], None))
    weights = torch.tensor([toy.target(drafts[:place]) for place in range(DRAFTS + 1)], dtype=torch.float64)[None]
    bits[0, [place for place in range(DRAFTS + 1) if END in drafts[:place]]] = -1  # what follows an end is not used
    HostMasks(torch.tensor([0]), bits).mask(weights)
    found = weights[0].clamp(min=0)
    for place, row in enumerate(found):
        if not row.any():
            row[min(allowed(drafts[:place]))] = 1
    return found / found.sum(-1, keepdim=True)


def drafted(toy: Toy, numbers: torch.Tensor, *, is_free: bool = False) -> Proposal:
    """Chains by random numbers [rows, DRAFTS], from the scores of a draft that does not know the grammar."""
    flags = SamplingFlags(sampled=True, constrained=True)
    lattice = replace(lattice_of({DRAFT: numbers}), flags=flags)
    step = step_of(Weights(**vars(lattice)), len(numbers), is_free=torch.full((len(numbers),), is_free))
    chain = DraftChain(step, ids=None, vocabulary=len(LETTERS) + 1)
    for place in range(DRAFTS):
        prefixes = [tuple(row) for row in chain.tokens[:, :place].tolist()]
        chain.choose(torch.tensor([toy.draft(prefix) for prefix in prefixes], dtype=torch.float64))
    return chain.proposal()


@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_samples_of_the_masked_distribution(seed: int) -> None:
    toy, known = Toy(seed, 5, 4), Restricted(seed, 5, 4)
    proposal = drafted(toy, toy.numbers(DRAFTS))
    assert proposal.probabilities is not None
    found = Counter(map(tuple, proposal.tokens.tolist()))
    for text in itertools.product(range(5), repeat=DRAFTS):
        chances = [known.draft(text[:place])[token] for place, token in enumerate(text)]
        assert found[text] / len(proposal.tokens) == pytest.approx(math.prod(chances), abs=1e-12)
    for text, q in zip(proposal.tokens.tolist(), proposal.probabilities, strict=True):
        for place in range(DRAFTS):
            assert q[place].tolist() == pytest.approx(known.draft(tuple(text[:place])), abs=1e-6)


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("seed", first_quick(3, range(6)))
def test_a_verify_of_these_drafts_is_lossless(seed: int, on_host: bool) -> None:
    """What is emitted by all random numbers has the distribution of the target that knows the grammar. With a grammar
    on the host the drafts do not know it."""
    toy, known = Toy(seed, 5, 3), Restricted(seed, 5, 3)
    proposal = drafted(toy, toy.numbers(DRAFTS), is_free=on_host)
    assert proposal.probabilities is not None
    # With denominators up to 3 in p and q thresholds have those of 36, and what is left of p those up to 6.
    midpoints = [(torch.arange(cells, dtype=torch.float64) + 0.5) / cells for cells in (36, 36, 60)]
    numbers = torch.cartesian_prod(*midpoints)
    grid = {ACCEPT: numbers[:, :2], RESIDUAL: numbers[:, 2:].expand(-1, DRAFTS + 1)}
    grid[ACCEPT] = torch.nn.functional.pad(grid[ACCEPT], (0, 1))
    whole: dict[Text, float] = defaultdict(float)
    rows = len(numbers)
    chances = Counter(map(tuple, proposal.tokens.tolist()))
    for text, q in {
        tuple(text): q for text, q in zip(proposal.tokens.tolist(), proposal.probabilities, strict=True)
    }.items():
        p = torch.tensor([known.target(text[:place]) for place in range(DRAFTS + 1)], dtype=torch.float64)
        if on_host:
            p = masked_on_host(toy, text)
        drafts = Proposal(torch.tensor(text).expand(rows, -1), torch.full((rows,), DRAFTS), q.expand(rows, -1, -1))
        result = accept_ref(
            p.expand(rows, -1, -1), drafts, torch.arange(1, DRAFTS + 2).expand(rows, -1), lattice_of(grid)
        )
        for run, share in toy.emitted(result).items():
            whole[run] += share * chances[text] / len(proposal.tokens)
    assert known.error(whole, DRAFTS + 1) < 1e-9


def kept(prefix: Text, drafts: Text, count: int) -> Text:
    """Drafts as far as they may follow, then letters that are forced."""
    found: Text = ()
    for place in range(DRAFTS):
        can_follow = allowed(prefix + found)
        if found == drafts[:place] and place < count and drafts[place] in can_follow:
            found += (drafts[place],)
        elif len(can_follow) == 1:
            found += tuple(can_follow)
        else:
            break
    return found


@pytest.mark.parametrize("prefix", [(), (0,), (1,), (2,), (2, 3), FREE])
def test_drafts_that_were_looked_up_are_cut_and_forced_tokens_follow(prefix: Text | int) -> None:
    drafts = list(itertools.product(range(5), repeat=DRAFTS))
    step = step_of(lattice_of({}), len(drafts), is_free=torch.full((len(drafts),), prefix == FREE))
    if isinstance(prefix, tuple):
        assert step.sampling.constraint is not None
        step.sampling.constraint.states.fill_(AUTOMATON.after(prefix))
    for count in range(DRAFTS + 1):
        tokens, drafted = allowed_drafts(step, torch.tensor(drafts), torch.full((len(drafts),), count))
        for given, row, most in zip(drafts, tokens.tolist(), drafted.tolist(), strict=True):
            wanted = kept(prefix, given, count) if isinstance(prefix, tuple) else given[:count]
            assert tuple(row[:most]) == wanted


@pytest.mark.parametrize("at_once", [False, True])
def test_greedy_drafts_are_allowed_and_free_requests_keep_theirs(at_once: bool) -> None:
    """Of a draft whose columns are b, d and a. Where it has none that is allowed, it drafts one that is rejected."""
    ids, flags = torch.tensor([1, 3, 0]), SamplingFlags(constrained=True)
    sampling = replace(lattice_of({}), flags=flags)
    step = step_of(sampling, 3, is_free=torch.tensor([False, True, False]))
    scores = torch.tensor([1.0, 3.0, 2.0]).repeat(3, 2, 1).half()
    scores[2, 0] = torch.tensor([3.0, 1.0, 2.0])  # b first: a, which the draft has, or c, which it does not have
    scores[2, 1] = torch.tensor([3.0, 1.0, -torch.inf])
    if at_once:
        proposal = choose_at_once(scores, step, ids=ids, vocabulary=5)
    else:
        chain = DraftChain(step, ids=ids, vocabulary=5)
        embedded = torch.stack(
            [chain.choose_embedded(scores[:, place], torch.arange(5.0)[:, None]) for place in range(2)]
        )
        assert torch.equal(embedded[..., 0].T.long(), chain.tokens)
        proposal = chain.proposal()
    assert proposal.probabilities is None
    assert proposal.tokens[:2].tolist() == [[0, 1], [3, 3]]
    assert proposal.tokens[2, 0] == 1
    assert proposal.drafted.tolist() == [2, 2, 2]


def test_a_draft_without_allowed_tokens_still_has_a_distribution() -> None:
    """A draft that only has a and d, of which none may follow an a."""
    sampling = replace(sampling_of(50), flags=SamplingFlags(sampled=True, constrained=True))
    step, scores = step_of(sampling, 50), torch.randn(50, 2, 2).half()
    proposal = choose_at_once(scores, step, ids=torch.tensor([0, 3]), vocabulary=5)
    assert proposal.probabilities is not None
    assert proposal.tokens[:, 0].tolist() == [0] * 50
    assert proposal.probabilities[0].tolist() == [[1, 0, 0, 0, 0], [0.5, 0, 0, 0.5, 0]]


def test_penalties_of_drafts_count_the_tokens_up_to_the_root() -> None:
    adjustments = Adjustments(None, None, torch.tensor([[2.0, 0.0, 1.0]]), torch.tensor([1]))
    step = step_of(lattice_of({}), 1)
    step = replace(step, lengths=torch.tensor([2]), sampling=replace(step.sampling, adjustments=adjustments))
    step.batch.tokens[1, :4] = torch.tensor([4, 0, 3, 1])  # the prompt, a token of the answer, the root, an old draft
    states = draft_states(step, 5)
    assert states is not None
    assert states.mask(torch.zeros(1, 2, 5)).tolist() == [[[-2, 0, 0, -2, 0]] * 2]
