"""Requests on a device batch as an engine holds them, and a tiny random model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from uncached import run_texts

from specbatch.core.attention_metadata import PrefillMetadata, PromptChunk
from specbatch.core.device_batch import DeviceBatch
from specbatch.core.sampling import Sampling, SamplingFlags
from specbatch.core.step_input import StepInput
from specbatch.drafters.base import Drafter
from specbatch.kernels.attention.prefill.prefill_backends import prefill_backend
from specbatch.memory.kv_cache import KVCache
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder, Features
from specbatch.models.weight_shapes import tensor_shapes
from specbatch.runtime.prefill_forward import EagerForward

PAGE = 4
CPU = torch.device("cpu")


def tiny_llama(vocabulary: int = 13, layers: int = 2) -> Decoder:
    """Random weights with sharp logits, so that rounding does not change an argmax."""
    config = ModelConfig.from_dict(
        {
            "architectures": ["LlamaForCausalLM"], "vocab_size": vocabulary, "hidden_size": 24,
            "intermediate_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        }
    )  # fmt: skip
    generator = torch.Generator().manual_seed(vocabulary)
    weights = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + noise / 4 if len(shape) == 1 else 1.5 * noise / math.sqrt(shape[1])
    return Decoder(config, weights.__getitem__, dtype=torch.float32, device=CPU, max_positions=256)


class Bench:
    """Rows of a batch in scattered slots and pages, each with its text for the references."""

    def __init__(self, prompts: list[list[int]], width: int = 128) -> None:
        count = len(prompts)
        self.texts = [list(prompt) for prompt in prompts]  # the last token is the root
        pages = -(-width // PAGE)
        self.batch = DeviceBatch(count + 2, width, pages, CPU)
        self.batch.tokens.random_(0, 13, generator=torch.Generator().manual_seed(1))  # stale, as after other requests
        generator = torch.Generator().manual_seed(0)
        self.rows = (torch.randperm(count + 2, generator=generator) + 1)[:count]
        self.pages = (count + 2) * pages
        self.batch.page_table[1:] = (torch.randperm(self.pages, generator=generator) + 1).view(-1, pages)
        for row, text in zip(self.rows.tolist(), self.texts, strict=True):
            self.batch.tokens[row, : len(text)] = torch.tensor(text)
            self.batch.lengths[row] = len(text) - 1

    def cache_for(self, model: Decoder) -> KVCache:
        return self.cache_of(model.config, len(model.layers))

    def cache_of(self, config: ModelConfig, layers: int) -> KVCache:
        attention = prefill_backend("torch", CPU)
        return KVCache(config, layers, self.pages, PAGE, torch.float32, CPU, attention)

    def forward_of(self, model: Decoder) -> tuple[EagerForward, KVCache]:
        """The model's prefill forward pass, and its cache."""
        cache = self.cache_for(model)
        return EagerForward(model, cache), cache

    def check_keys(self, model: Decoder, cache: KVCache, missing: int = 0) -> None:
        """Checks that the cached KV matches the texts, except for the `missing` newest positions."""
        _, fresh = run_texts(model, self.texts)
        for index, (row, text) in enumerate(zip(self.rows.tolist(), self.texts, strict=True), 1):
            positions = torch.arange(max(len(text) - missing, 0))
            pages = self.batch.page_table[row, positions // PAGE]
            for ours, theirs in zip(cache.k + cache.v, fresh.k + fresh.v, strict=True):
                expected = theirs[index, : len(positions)]
                torch.testing.assert_close(ours[pages, positions % PAGE], expected, rtol=1e-4, atol=1e-5)

    def prefill(self, drafter: Drafter, chunk: int = 1000, target: tuple[Decoder, KVCache] | None = None) -> None:
        """All positions before the root, in chunks; also through the target if it is given."""
        ends = [len(text) - 1 for text in self.texts]
        self.batch.lengths[self.rows] = 0
        for start in range(0, max(ends), chunk):
            spans = [
                PromptChunk(row, start, min(start + chunk, end))
                for row, end in zip(self.rows.tolist(), ends, strict=True)
                if start < end
            ]
            metadata = PrefillMetadata(self.batch.page_table, spans, PAGE, self.batch.tokens)
            features = Features(torch.empty(len(metadata.positions), 0), None)
            if target is not None:
                model, cache = target
                tokens = self.batch.tokens[metadata.slots, metadata.positions]
                features = model.forward(tokens, metadata.positions, metadata.bind(cache))
            drafter.prefill(self.batch, metadata, features)
            for span in spans:
                self.batch.lengths[span.slot] = span.end

    def step(self, drafts: int, *, spare: int = 0, **sampling: Any) -> StepInput:
        """One iteration over all rows. `spare`: slots reserved beyond what this iteration can fill."""
        lengths = self.batch.lengths[self.rows]
        bound = int(lengths.max()) + drafts + 1 + spare
        count = len(self.texts)
        values = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | sampling
        temperature, top_k, top_p, min_p = (torch.as_tensor(value).expand(count) for value in values.values())
        return StepInput(
            batch=self.batch,
            slots=self.rows,
            lengths=lengths,
            num_drafts=drafts,
            page_size=PAGE,
            bound=bound,
            sampling=Sampling(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seeds=torch.arange(count) + 40,
                flags=SamplingFlags(
                    sampled=bool((temperature > 0).any()),
                    truncated=bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any()),
                ),
            ),
        )

    def acceptances(self, count: int, randomness: random.Random) -> list[list[int]]:
        """Accepted drafts per iteration and row: all, none, all twice in a row, and random counts."""
        rows = len(self.texts)
        turns = [[count] * rows, [0] * rows, [count] * rows, [count] * rows]
        return turns + [[randomness.randint(0, count) for _ in range(rows)] for _ in range(3)]

    def commit(self, drafts: torch.Tensor, accepted: list[int], bonus: list[int]) -> None:
        """Commits like an iteration: writes all its tokens; those after the bonus token are stale."""
        for index, (row, text) in enumerate(zip(self.rows.tolist(), self.texts, strict=True)):
            kept = [*drafts[index, : accepted[index]].tolist(), bonus[index]]
            written = kept + drafts[index, accepted[index] :].tolist()
            self.batch.tokens[row, len(text) : len(text) + len(written)] = torch.tensor(written)
            text += kept
            self.batch.lengths[row] = len(text) - 1


@pytest.fixture
def bench() -> Callable[..., Bench]:
    return Bench


@pytest.fixture
def tiny() -> Callable[..., Decoder]:
    return tiny_llama
