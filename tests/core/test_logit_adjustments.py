"""Penalties and biases: the rules, and that a row sees drafted tokens as if they had been generated."""

from __future__ import annotations

from random import Random

import pytest
import torch
from trees import ancestor_masks, path_of, random_parents

from specbatch.core.draft_states import DraftStates
from specbatch.core.logit_adjustments import ANY, Adjustments, History, adjusted_logits
from specbatch.core.token_constraint import NEVER

BATCH, VOCABULARY, WIDTH = 3, 11, 9


def by_hand(
    logits: list[float],
    history: list[int],
    prompt: int,
    bias: dict[int, float],
    how: list[float],
    words: list[list[int]],
) -> list[float]:
    presence, frequency, repetition = how
    answer, found = history[prompt:], []
    for token, logit in enumerate(logits):
        value = logit + bias.get(token, 0.0)
        if token in history:
            value = value / repetition if value > 0 else value * repetition
        made = answer.count(token)
        value -= frequency * made + presence * (made > 0)
        ends = (answer[len(answer) - len(word) + 1 :] == word[:-1] for word in words if word[-1] == token)
        found.append(float("-inf") if any(ends) else value)
    return found


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_is_adjusted_by_its_own_history(is_tree: bool, dtype: torch.dtype) -> None:
    rng, nodes = Random(0), 6
    torch.manual_seed(0)
    logits = (3 * torch.randn(BATCH, nodes, VOCABULARY)).to(dtype)
    tokens = torch.randint(VOCABULARY, (BATCH, WIDTH))
    lengths, prompts, drafts = [4, 9, 1], [4, 2, 1], torch.randint(VOCABULARY, (BATCH, nodes - 1))
    penalties = [[0.5, 0.0, 1.0], [-0.3, 0.7, 1.4], [0.0, 0.0, 0.6]]
    biases = [{3: 5.0, 10: -100.0}, {}, {0: 1.5}]
    parents = [random_parents(rng, nodes, is_tree) for _ in range(BATCH)]
    masks = torch.tensor([ancestor_masks(tree) for tree in parents]) if is_tree else None
    table = [[*one.items(), (0, 0.0), (0, 0.0)][:2] for one in biases]
    words = [[[1], [4, 5]], [[token, 2] for token in range(VOCABULARY)], []]
    words[1] += [[one, other, 7] for one in range(VOCABULARY) for other in range(0, VOCABULARY, 2)]
    most, longest = max(map(len, words)), 4
    banned = [
        [*([ANY] * (longest - len(word)) + word for word in of), *[[ANY] * longest] * (most - len(of))] for of in words
    ]
    adjustments = Adjustments(
        torch.tensor([[token for token, _ in row] for row in table]),
        torch.tensor([[value for _, value in row] for row in table]),
        torch.tensor(penalties),
        torch.tensor(prompts),
        torch.tensor(banned),
    )
    before = logits.clone()
    found = adjusted_logits(logits, adjustments, History(tokens, torch.tensor(lengths), drafts, masks))
    assert torch.equal(logits, before)
    for one in range(BATCH):
        known = tokens[one, : lengths[one]].tolist()
        for node in range(nodes):
            path = [int(drafts[one, step - 1]) for step in path_of(parents[one], node)[1:]]
            wanted = by_hand(
                logits[one, node].tolist(), known + path, prompts[one], biases[one], penalties[one], words[one]
            )
            assert found[one, node].tolist() == pytest.approx(wanted, abs=1e-5)


def test_only_what_is_asked_for_changes() -> None:
    logits = torch.randn(1, 1, VOCABULARY)
    history = History(torch.tensor([[3, 3, 4]]), torch.tensor([3]))
    prompts = torch.tensor([0])
    off = Adjustments(None, None, torch.tensor([[0.0, 0.0, 1.0]]), prompts)
    assert torch.equal(adjusted_logits(logits, off, history), logits)
    biased = adjusted_logits(logits, Adjustments(torch.tensor([[2]]), torch.tensor([[1.0]]), None, prompts), history)
    assert (biased - logits).nonzero().tolist() == [[0, 0, 2]]


@pytest.mark.parametrize("columns", ["all", "of the draft", "of each request"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafts_are_chosen_from_logits_adjusted_at_the_root(columns: str, dtype: torch.dtype) -> None:
    """In all nodes; bad words of several tokens are left out, and the others stay above what a grammar forbids."""
    torch.manual_seed(1)
    ids = {
        "all": torch.arange(VOCABULARY).expand(BATCH, -1),
        "of the draft": torch.tensor([7, 0, 3, 10, 5]).expand(BATCH, -1),
        "of each request": torch.stack([torch.randperm(VOCABULARY)[:6] for _ in range(BATCH)]),
    }[columns]
    tokens, lengths, prompts = torch.randint(VOCABULARY, (BATCH, WIDTH)), [4, 9, 1], [4, 2, 1]
    penalties = [[0.5, 0.0, 1.0], [-0.3, 0.7, 1.4], [0.0, 0.0, 1.0]]
    biases = [{3: 5.0, 10: -100.0}, {}, {}]
    words: list[list[list[int]]] = [[[3], [5]], [[7]], []]
    table = [[*one.items(), (0, 0.0), (0, 0.0)][:2] for one in biases]
    longer = [[[1, token] for token in range(VOCABULARY)] + [[int(row[length - 1]), 0]]
              for row, length in zip(tokens, lengths, strict=True)]  # fmt: skip
    adjustments = Adjustments(
        torch.tensor([[token for token, _ in row] for row in table]),
        torch.tensor([[value for _, value in row] for row in table]),
        torch.tensor(penalties),
        torch.tensor(prompts),
        torch.tensor([
            [*[[ANY] * (2 - len(word)) + word for word in one + more], *[[ANY, ANY]] * (2 - len(one))]
            for one, more in zip(words, longer, strict=True)
        ]),
    )  # fmt: skip
    states = DraftStates(adjustments, History(tokens, torch.tensor(lengths)), VOCABULARY)
    scores = (3 * torch.randn(BATCH, 3, ids.shape[1])).to(dtype)
    before = scores.clone()
    given = {"all": None, "of the draft": ids[0], "of each request": ids}[columns]
    assert states.mask(scores, given) is scores
    for one in range(BATCH):
        history = tokens[one, : lengths[one]].tolist()
        for node in range(3):
            whole = torch.zeros(VOCABULARY).index_copy(0, ids[one], before[one, node].float()).tolist()
            wanted = by_hand(whole, history, prompts[one], biases[one], penalties[one], words[one])
            wanted = [NEVER / 2 if wanted[token] == -float("inf") else wanted[token] for token in ids[one].tolist()]
            assert scores[one, node].tolist() == pytest.approx(wanted, rel=1e-5 if dtype == torch.float32 else 1e-2)
    assert torch.equal(scores[2], before[2])
