"""Training data: examples as token ids, without the held-out ones."""

from __future__ import annotations

import pytest
import torch

from specbatch.errors import SpecbatchError
from specbatch.training.data import Batch, Example, endless, frequent, groups, split
from specbatch.training.target import Target

from .conftest import CPU, VOCABULARY


def some(*lengths: int) -> list[Example]:
    return [Example(tuple(range(count, count + count)), 2) for count in lengths]


def test_held_out_prompts_are_never_trained_on():
    examples = some(5, 6, 7, 8)
    duplicate = Example((*examples[-1].tokens[:2], 1, 2, 3), 2)  # the same prompt, another answer
    train, kept = split([duplicate, *examples], 2)
    assert kept == examples[2:]
    assert train == examples[:2]
    with pytest.raises(SpecbatchError, match="held_out=4"):
        split(examples, 4)


def test_batches_fit_the_token_budget_and_cover_each_example_once():
    examples = some(5, 9, 3, 4, 30, 8, 8)
    found = list(groups(examples, 24))
    assert [item for group in found for item in group] == examples
    for group in found:
        assert len(group) == 1 or len(group) * max(len(item.tokens) for item in group) <= 24
    assert max(map(len, found)) > 1


def test_epochs_are_shuffled_by_seed():
    examples = some(*range(4, 20))

    def take(seed: int, passes: int) -> list[Example]:
        batches = endless(examples, 40, seed)
        found: list[Example] = []
        while len(found) < passes * len(examples):
            found += next(batches)
        return found

    first = take(3, 2)
    assert first == take(3, 2) != take(4, 2)
    assert sorted(first[:16], key=lambda item: len(item.tokens)) == examples
    assert first[:16] != first[16:]


def test_batches_of_an_epoch_have_little_padding_and_no_order():
    generator = torch.Generator().manual_seed(0)
    examples = some(*torch.randint(10, 60, (300,), generator=generator).tolist())
    real = padded = 0
    longest = []
    for batch, _ in zip(endless(examples, 500, 1), range(60), strict=False):
        lengths = [len(item.tokens) for item in batch]
        real, padded, longest = real + sum(lengths), padded + len(batch) * max(lengths), [*longest, max(lengths)]
    assert real / padded > 0.9
    assert longest != sorted(longest)


def test_draft_vocabulary_holds_the_most_frequent_answer_tokens():
    examples = [Example((9, 9, 9, 9, 5, 5, 5, 3), 4), Example((9, 4, 3, 1), 1)]
    assert frequent(examples, 3, 12).tolist() == [1, 3, 5]  # of those seen once, the lowest
    assert frequent(examples, 5, 12).tolist() == [0, 1, 3, 4, 5]


def test_features_do_not_depend_on_batch(target: Target):
    """Neither padding nor other rows are attended to, and layers are counted from 0."""
    generator = torch.Generator().manual_seed(0)
    rows = [tuple(torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()) for n in (9, 4, 12)]
    batch = Batch.of([Example(row, 1) for row in rows], CPU)
    last, aux = target.features(batch, (1, 5))
    assert aux is not None
    for index, row in enumerate(rows):
        alone, states = target.features(Batch.of([Example(row, 1)], CPU), (5, 1))
        assert states is not None
        torch.testing.assert_close(last[index, : len(row)], alone[0])
        torch.testing.assert_close(aux[index, : len(row)], torch.cat([*reversed(states[0].chunk(2, -1))], -1))
