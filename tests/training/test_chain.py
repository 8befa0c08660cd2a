"""Unrolled training steps over all positions equal drafting at each position alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specbatch.training.chain import Memory, ahead
from specbatch.training.data import Batch, Example
from specbatch.training.eagle import EagleHead
from specbatch.training.eagle3 import Eagle3Head
from specbatch.training.mtp import MtpHead
from specbatch.training.peagle import PEagleHead

from .conftest import CPU, VOCABULARY

STEPS, LENGTH = 3, 12


@pytest.fixture(params=["eagle", "eagle of 2", "eagle3", "eagle3 of 3", "mtp"])
def head(request, target):
    """Every parameter is random and large enough to matter."""
    algorithm, _, layers = request.param.partition(" of ")
    sizes = {"steps": STEPS, "max_len": LENGTH, "seed": 3, "layers": int(layers or 1)}
    if algorithm == "eagle":
        made = EagleHead(target, **sizes)
    elif algorithm == "mtp":
        made = MtpHead(target, steps=STEPS, max_len=LENGTH, seed=3)
    else:
        made = Eagle3Head(target, torch.arange(VOCABULARY), **sizes)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
    return made


@torch.no_grad()
def test_unrolled_steps_match_single_position_drafts(head, target):
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    batch = Batch.of([Example(tuple(row), 1) for row in tokens.tolist()], CPU)
    start = head.begin(*target.features(batch, head.aux))
    memory, hidden, unrolled = Memory(head.rotary, torch.arange(LENGTH), head.depth), start, []
    for step in range(STEPS):
        hidden = head.advance(F.embedding(ahead(tokens, 1 + step, 0), target.embedding), hidden, memory)
        unrolled.append(hidden)
    for place in (0, 3, LENGTH - STEPS - 1):
        pairs = start[:, : place + 1]
        for step in range(STEPS):
            count = place + 1 + step
            embedded = F.embedding(tokens[:, 1 : count + 1], target.embedding)
            alone = head.advance(embedded, pairs, Memory(head.rotary, torch.arange(count), head.depth))[:, -1:]
            size = float(alone.abs().max())  # the hidden states of EAGLE have no norm
            torch.testing.assert_close(unrolled[step][:, place], alone[:, 0], rtol=1e-4, atol=1e-4 * max(size, 1))
            pairs = torch.cat([pairs, alone], 1)


@torch.no_grad()
def test_loss_covers_drafts_after_answer_tokens_only(head, target):
    """An answer of n tokens has n - 1 - k places for draft k: its first token is the first root."""
    tokens = tuple(torch.randint(3, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(6)).tolist())
    batch = Batch.of([Example(tokens, 5), Example(tokens[:9], 6)], CPU)
    places = head.score(batch, target, torch.Generator()).sums[3].tolist()
    assert places == [(7 - 1 - k) + (3 - 1 - k) for k in range(STEPS)]


@pytest.mark.parametrize("algorithm", ["eagle", "eagle3", "peagle"])
def test_loss_follows_the_formula(target, algorithm):
    """Cross entropy with the target's distribution over the head's tokens, where the target's token is one of them.
    EAGLE also compares hidden states, and P-EAGLE has another decay."""
    kept = torch.arange(0, VOCABULARY, 1 if algorithm == "eagle" else 2)
    if algorithm == "eagle":
        head = EagleHead(target, steps=STEPS, max_len=LENGTH, seed=3)
    elif algorithm == "peagle":
        head = PEagleHead(target, kept, mask_token=VOCABULARY - 1, steps=STEPS, max_len=LENGTH, seed=3, layers=2)
    else:
        head = Eagle3Head(target, kept, steps=STEPS, max_len=LENGTH, seed=3)
    rows = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(6)).tolist()
    batch = Batch.of([Example(tuple(rows[0]), 5), Example(tuple(rows[1][:9]), 6)], CPU)
    found = head.score(batch, target, torch.Generator())
    found.loss.backward()
    gradient = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}

    last, aux = target.features(batch, head.aux)
    memory, hidden, means = Memory(head.rotary, torch.arange(LENGTH), head.depth), head.begin(last, aux), []
    for step in range(STEPS):
        hidden = head.advance(F.embedding(ahead(batch.tokens, 1 + step, 0), target.embedding), hidden, memory)
        losses = []
        for row, (prompt, length) in enumerate([(5, LENGTH), (6, 9)]):
            for place in range(prompt - 1, length - 2 - step):
                theirs = target.logits(last[row, None, place + 1 + step])[0]
                if int(theirs.argmax()) in kept:
                    loss = F.cross_entropy(head.predict(hidden[row, place], target), theirs[kept].softmax(-1))
                    if algorithm == "eagle":
                        away = (hidden[row, place] - last[row, place + 1 + step]).abs()
                        loss = 0.1 * loss + torch.where(away < 1, away.square() / 2, away - 0.5).mean()
                    losses.append(loss)
        means.append(torch.stack(losses).mean())
    decay = 0.7 if algorithm == "peagle" else 0.8
    expected = (means[0] + decay * means[1] + decay**2 * means[2]) / (1 + decay + decay**2)
    torch.testing.assert_close(found.loss, expected)
    head.zero_grad()
    expected.backward()
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(gradient[name], parameter.grad, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_masked_steps_of_peagle_read_no_tokens(target):
    """Their drafts depend on the tokens up to their place alone."""
    head = PEagleHead(target, torch.arange(VOCABULARY), mask_token=39, steps=STEPS, max_len=LENGTH, seed=3, layers=2)
    tokens = torch.randint(3, VOCABULARY - 1, (1, LENGTH), generator=torch.Generator().manual_seed(5))
    last, aux = target.features(Batch.of([Example(tuple(tokens[0].tolist()), 1)], CPU), head.aux)
    found = []
    for text in (tokens, torch.cat([tokens[:, :6], tokens[:, 6:].flip(1)], 1)):  # the same up to place 4 and its token
        memory, hidden = Memory(head.rotary, torch.arange(LENGTH), 2), head.begin(last, aux)
        steps = []
        for step in range(STEPS):
            hidden = head.advance(F.embedding(ahead(text, 1 + step, 0), target.embedding), hidden, memory)
            steps.append(hidden[0, :5])
        found.append(torch.stack(steps))
    torch.testing.assert_close(*found)
    assert not torch.allclose(found[0][1], found[0][2])


def test_target_positions_of_draft_steps():
    rows = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert ahead(rows, 1, 0).tolist() == [[2, 3, 0], [5, 6, 0]]
    assert ahead(rows, 5, -1).tolist() == [[-1] * 3] * 2


@pytest.mark.parametrize("most", [1, 5, 12])
def test_long_texts_are_attended_in_parts(monkeypatch, most):
    """Outputs and gradients are those of all queries at once, in every step."""
    generator = torch.Generator().manual_seed(0)
    steps = [
        [torch.randn(2, LENGTH, 2, *more, 8, generator=generator) for more in ((3,), (), ())] for _ in range(STEPS)
    ]

    def run():
        inputs = [[tensor.clone().requires_grad_() for tensor in step] for step in steps]
        memory = Memory(None, torch.arange(LENGTH))
        outputs = [memory.attend(*step) for step in inputs]
        sum((output * (place + 1)).square().sum() for place, output in enumerate(outputs)).backward()
        return [*outputs, *(tensor.grad for step in inputs for tensor in step)]

    whole = run()
    monkeypatch.setattr("specbatch.training.chain.MOST_QUERIES", most)
    torch.testing.assert_close(run(), whole, rtol=1e-5, atol=1e-4)  # sums in another order
