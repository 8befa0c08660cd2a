"""The price of deterministic mode: forward passes of Qwen3-8B, or another model, in BF16 with and without it, from CUDA
graphs.

Random weights. A step computes some rows for each of a batch of sequences with 1024 keys (1 row is plain decoding, more
are a verify) and the argmax of their logits; a prompt pass computes 1024 tokens and the logits of the last one. Neither
includes the drafter, acceptance or the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import torch
import typer

from specbatch import weights
from specbatch.core.attention_metadata import DecodeMetadata, PrefillMetadata, PromptChunk, positions_from
from specbatch.kernels.attention.prefill.prefill_backends import prefill_backend
from specbatch.kernels.dispatch import use_deterministic
from specbatch.kernels.sampling.argmax_topk import argmax
from specbatch.memory.kv_cache import KVCache
from specbatch.models.decoder import Decoder
from specbatch.sweeps.microbench.runner import Call, Case, Table

PAGE, KEYS, REACH, MOST = 16, 1024, 1056, 128
STEPS = ((1, 1), (32, 1), (128, 1), (1, 4), (1, 8), (32, 4), (32, 8), (128, 4))


class Target:
    """A model with random weights, and a cache of `MOST` sequences."""

    def __init__(self, name: str) -> None:
        device, dtype = torch.device("cuda"), torch.bfloat16
        found = weights.open_checkpoint(name, "dummy", device="cuda")
        self.model = Decoder(found.config, found.tensor, dtype=dtype, device=device, max_positions=REACH)
        pages = REACH // PAGE
        self.table = (1 + torch.randperm(MOST * pages, device=device)).view(MOST, pages)
        attention = prefill_backend("triton", device)
        self.kv = KVCache(found.config, self.model.kv_layers, MOST * pages, PAGE, dtype, device, attention)
        self.kv.keys.normal_()
        self.kv.values.normal_()

    def step(self, batch: int, rows: int) -> Call:
        """A pass over `rows` tokens of each of `batch` sequences, as a whole graph records it."""
        device, vocabulary = self.table.device, self.model.config.vocab_size
        tokens = torch.randint(vocabulary, (batch * rows,), device=device)
        slots = torch.arange(batch, device=device)
        lengths = torch.full((batch,), KEYS, device=device)
        positions = positions_from(lengths, rows).flatten()

        def run() -> torch.Tensor:
            metadata = DecodeMetadata(self.table, slots, lengths, rows, PAGE, REACH - 1)
            hidden = self.model.forward(tokens, positions, metadata.bind(self.kv)).last
            return argmax(self.model.scores(hidden, greedy=True))

        return run

    def prompt(self, count: int) -> Call:
        metadata = PrefillMetadata(self.table, [PromptChunk(0, 0, count)], PAGE)
        tokens = torch.randint(self.model.config.vocab_size, (count,), device=self.table.device)

        def run() -> torch.Tensor:
            context = metadata.bind(self.kv)
            return self.model.logits(self.model.forward(tokens, metadata.positions, context, metadata.last).last)

        return run


def in_both_modes(run: Call) -> dict[str, list[Call]]:
    def deterministic() -> object:
        with use_deterministic():
            return run()

    return {"default": [run], "deterministic": [deterministic]}


def tables(
    model: Annotated[str, typer.Option(help="A named shape without recurrent layers.")] = "qwen3-8b",
) -> Iterator[Table]:
    target = Target(model)
    steps = (
        Case({"batch": batch, "rows each": rows}, in_both_modes(target.step(batch, rows))) for batch, rows in STEPS
    )
    yield Table(steps, f"A step of {model}, {KEYS} keys", unit="ms")
    prompts = (Case({"tokens": count}, in_both_modes(target.prompt(count))) for count in (128, 1000, KEYS))
    yield Table(prompts, f"A prompt pass of {model}", unit="ms")
