"""Penalties and biases: the rules, and that a row sees drafted tokens as if they had been generated."""

from __future__ import annotations

from random import Random

import pytest
import torch
from trees import ancestor_masks, path_of, random_parents

from specbatch.core.logit_adjustments import ANY, Adjustments, History, adjusted_logits

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
