"""The training loop: AdamW, cosine schedule, gradient clipping, and evaluation on held-out answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from itertools import islice
from typing import Any

import torch

from specbatch.algorithms import ALGORITHMS
from specbatch.core.async_copy import AsyncCopy
from specbatch.engine.device.deferred_interrupts import DeferredInterrupts
from specbatch.errors import refuse
from specbatch.progress.bars import Report
from specbatch.training.data import Batch, Example, endless, groups
from specbatch.training.head import Head
from specbatch.training.recipe import Recipe
from specbatch.training.saved_state import SavedState, Training
from specbatch.training.target import Target

WARMUP = 0.04  # share of the steps with a rising learning rate
FLOOR = 0.1  # final learning rate relative to the peak
CLIP = 1.0  # maximum gradient norm
WEIGHT_DECAY = 0.01
BETAS = (0.9, 0.95)
LINES = 10  # evaluations per run, not counting the one before the first update


@dataclass(frozen=True)
class Evaluation:
    """Loss and accuracy of a head, by draft position.

    loss           of the head's training, such as the cross entropy with the target's distribution
    accuracy       share of places where the draft equals the target's token
    chain          share of places where it and all drafts before it do
    accept_length  1 + the sum of `chain`: tokens per verify, if verifies started equally often at every token
    places         number of places
    """

    loss: list[float]
    accuracy: list[float]
    chain: list[float]
    accept_length: float
    places: list[int]

    @classmethod
    def of(cls, sums: torch.Tensor) -> Evaluation:
        """sums: as in `Scores`."""
        sums = sums.cpu()
        losses, hits, chains = (part / sums[3].clamp(min=1) for part in sums[:3])
        length = 1 + float(chains.sum())
        return cls(losses.tolist(), hits.tolist(), chains.tolist(), length, sums[3].long().tolist())

    def __str__(self) -> str:
        shares = " ".join(f"{100 * share:.0f}" for share in self.accuracy)
        return f"loss {self.loss[0]:.3f}, accuracy by position {shares} %, accept length {self.accept_length:.2f}"


@dataclass
class History:
    """steps: updates made; seconds: training time; measured: step -> evaluation on held-out answers; losses: step ->
    mean training loss since the previous evaluation."""

    steps: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    measured: dict[int, Evaluation] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, known: dict[str, Any]) -> History:
        """Of `as_dict` of an interrupted training, which continues."""
        measured = {step: Evaluation(**values) for step, values in known["measured"].items()}
        return cls(known["steps"], known["seconds"], False, measured, known["losses"])


def method_of(recipe: Recipe) -> Any:
    """The module that trains heads of the recipe's algorithm: its `untrained_head`, and for heads that are stored with
    the target its `takes_a_head`, which returns the target's checkpoint if it can."""
    training = ALGORITHMS[recipe.algorithm].training
    assert training is not None
    return import_module(training.module)


def make_head(recipe: Recipe, target: Target, train: Sequence[Example], spare_tokens: int) -> Head:
    """An untrained head. spare_tokens: ids from this one on are not used by the tokenizer."""
    head: Head = method_of(recipe).untrained_head(recipe, target, train, spare_tokens)
    return head


def train(
    head: Head,
    target: Target,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    recipe: Recipe,
    saved: SavedState | None = None,
    *,
    log: Callable[[str], None],
    report: Report,
) -> History:
    """Update `head` in place. Ctrl-C ends the training early; it is recorded in the history and not raised, so that the
    head can be written.

    saved: where the state is saved from time to time and after Ctrl-C, and continued from. Ctrl-C takes effect after
    the step that is running.
    """
    on_gpu = target.device.type == "cuda"
    optimizer = torch.optim.AdamW(head.parameters(), recipe.lr, BETAS, weight_decay=WEIGHT_DECAY, fused=on_gpu)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, recipe.steps))
    generator = torch.Generator().manual_seed(recipe.seed)
    history = History()
    training = Training(head, optimizer, schedule, generator, history)
    if saved is not None and (known := saved.restore(training)) is not None:
        history = training.history = History.of(known)
        log(f"continuing after {history.steps} of {recipe.steps} steps")
    batches = islice(endless(examples, recipe.batch_tokens, recipe.seed), history.steps, recipe.steps)
    every = max(1, math.ceil(recipe.steps / LINES))
    copying = torch.cuda.Stream(target.device) if on_gpu else None
    losses: list[AsyncCopy] = []  # since the last evaluation; those of an earlier run are in `training.since`
    start = time.perf_counter() - history.seconds

    def settle() -> None:
        training.since += [_finite(loss, history.steps - 1, recipe) for loss in losses]
        losses.clear()
        history.seconds = time.perf_counter() - start

    def evaluate() -> None:
        settle()
        if training.since:
            history.losses[history.steps] = sum(training.since) / len(training.since)
            training.since = []
        _note(history, head, target, held_out, recipe, log)

    def is_due() -> bool:
        return history.steps % every == 0 or history.steps == recipe.steps

    try:
        if is_due() and history.steps not in history.measured:
            evaluate()
        for group in batches:
            with DeferredInterrupts():  # half of a step, such as its random numbers, would be saved with the state
                head.progress = history.steps / recipe.steps
                with _precision(target):
                    scores = head.score(Batch.of(group, target.device), target, generator)
                loss = AsyncCopy(scores.loss.detach(), stream=copying)
                optimizer.zero_grad()
                scores.loss.backward()
                torch.nn.utils.clip_grad_norm_(head.parameters(), CLIP)
                optimizer.step()
                schedule.step()
                history.steps += 1
                if losses:  # one step late, so that the device does not wait for the host
                    _finite(losses[-1], history.steps - 2, recipe)
                losses.append(loss)
            report(history.steps, recipe.steps)
            if is_due():
                evaluate()
            if saved is not None and saved.is_due:
                settle()
                saved.save(training)
    except KeyboardInterrupt:
        history.interrupted = True
        if saved is not None:
            settle()
            saved.save(training)
    history.seconds = time.perf_counter() - start
    return history


@torch.no_grad()
def measure(head: Head, target: Target, examples: Sequence[Example], recipe: Recipe) -> Evaluation:
    """Evaluate on `examples`, with the same random numbers each time."""
    generator = torch.Generator().manual_seed(recipe.seed)
    sums = torch.zeros(4, head.drafts, dtype=torch.float64, device=target.device)
    head.progress = 1.0
    for group in groups(examples, recipe.batch_tokens):
        with _precision(target):
            sums += head.score(Batch.of(group, target.device), target, generator).sums
    return Evaluation.of(sums)


def _finite(loss: AsyncCopy, steps: int, recipe: Recipe) -> float:
    """The loss, as the copy has it. steps: updates before it. Raises SpecbatchError if it is not finite."""
    [value] = loss.wait()
    if not math.isfinite(value):
        raise refuse("lr", recipe.lr, f"the loss is not finite after {steps} steps; lower it")
    return float(value)


def rate(step: int, steps: int) -> float:
    """Learning rate factor: linear warm-up, then cosine decay to FLOOR."""
    rise = max(1, round(WARMUP * steps))
    if step < rise:
        return (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def _note(
    history: History,
    head: Head,
    target: Target,
    held_out: Sequence[Example],
    recipe: Recipe,
    log: Callable[[str], None],
) -> None:
    found = history.measured[history.steps] = measure(head, target, held_out, recipe)
    trained = history.losses.get(history.steps)
    log(f"step {history.steps}: {'' if trained is None else f'training loss {trained:.3f}; '}held out: {found}")


@contextmanager
def _precision(target: Target) -> Iterator[None]:
    """GEMMs in the target's dtype; weights, sums and optimizer state stay float32."""
    with torch.autocast(target.device.type, target.dtype, enabled=target.dtype != torch.float32):
        yield
