"""Texts through a model in random company: in chunks, batches, chains and trees of draft tokens, on scattered pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import torch
from targets import TargetCheckpoint
from trees import ancestor_masks, path_of, random_parents

from specbatch.core.attention_metadata import DecodeMetadata, PrefillMetadata, PromptChunk
from specbatch.kernels.attention.prefill.prefill_backends import PrefillAttention, prefill_backend
from specbatch.kernels.common.kv_slots import VerifiedRows
from specbatch.kernels.dispatch import use_deterministic
from specbatch.memory.kv_cache import KVCache
from specbatch.memory.recurrent_state import RecurrentStates, state_types
from specbatch.models.cache_calibration import calibrate_cache
from specbatch.models.decoder import Decoder
from specbatch.weights.dummy import DummyCheckpoint

CPU, PAGE, MOST_ROWS = torch.device("cpu"), 8, 16


@dataclass
class Text:
    """A sequence on a slot, of which `done` tokens are computed, the first `prompt` of them in prompt passes."""

    slot: int
    tokens: list[int]
    prompt: int
    done: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done


class Company:
    """A tiny target whose texts are computed together. state: the type of matrix states; trees: verify some;
    calibrated: keys and values are stored as in the FP8 KV cache of an engine (None: if they are in FP8)."""

    def __init__(
        self,
        target: str | TargetCheckpoint | DummyCheckpoint,
        dtype: torch.dtype,
        state: str = "fp32",
        device: torch.device = CPU,
        kv_dtype: torch.dtype | None = None,
        trees: bool = True,
        attention: PrefillAttention | None = None,
        calibrated: bool | None = None,
    ) -> None:
        found = TargetCheckpoint(target) if isinstance(target, str) else target
        self._config, self._dtype, self._state = found.config, dtype, state
        self._device, self._kv_dtype, self._trees = device, kv_dtype or dtype, trees
        self._attention = attention or prefill_backend("auto", device)
        self._model = Decoder(found.config, found.tensor, dtype=dtype, device=device, max_positions=1024)
        calibrated = self._kv_dtype != dtype if calibrated is None else calibrated
        self.calibration = calibrate_cache(self._model) if calibrated else None
        if self.calibration is not None:
            self._model = self._model.with_k_offsets(self.calibration.k_offsets)

    @torch.inference_mode()
    def alone(self, tokens: list[int]) -> torch.Tensor:
        """Logits [len(tokens), V] from one prompt pass."""
        text = Text(1, tokens, len(tokens))
        self._prefill(self._cache([text], Random(0)), [(text, len(tokens))])
        return torch.cat(text.logits)

    @torch.inference_mode()
    def together(self, texts: list[list[int]], rng: Random) -> list[torch.Tensor]:
        """Logits of each text from passes of random rows."""
        held = [Text(slot, tokens, rng.randint(1, len(tokens))) for slot, tokens in enumerate(texts, 1)]
        self._cache(held, rng)
        while running := [text for text in held if text.left]:
            prompts = [text for text in running if text.done < text.prompt]
            decoding = [text for text in running if text.done >= text.prompt]
            if prompts and (not decoding or rng.random() < 0.5):
                some = rng.sample(prompts, rng.randint(1, len(prompts)))
                most = rng.choice((1, 5, 40, 200))
                self._prefill(self._kv, [(text, min(rng.randint(1, most), text.prompt - text.done)) for text in some])
            else:
                some = rng.sample(decoding, rng.randint(1, len(decoding)))
                is_tree = self._trees and rng.random() < 0.4
                self._verify(some, rng.randint(1, MOST_ROWS), is_tree=is_tree, rng=rng)
        return [torch.cat(text.logits) for text in held]

    def _cache(self, texts: list[Text], rng: Random) -> KVCache:
        pages = max(len(text.tokens) for text in texts) // PAGE + 4
        numbers = rng.sample(range(1, pages * len(texts) + 1), pages * len(texts))
        self._table = torch.zeros(len(texts) + 1, pages, dtype=torch.int64)
        self._table[1:] = torch.tensor(numbers).view(-1, pages)
        self._table = self._table.to(self._device)
        config, types = self._config, state_types(self._dtype, self._state)
        layers = max(self._model.recurrent_layers, 1)
        states = RecurrentStates(config.state_shapes, layers, len(texts) + 1, MOST_ROWS, types, self._device)
        count = self._model.kv_layers
        self._kv = KVCache(
            config, count, pages * len(texts), PAGE, self._kv_dtype, self._device, self._attention, states
        )
        if self.calibration is not None:
            self._kv.set_scales(self.calibration.k_scales, self.calibration.v_scales)
        return self._kv

    def _prefill(self, cache: KVCache, parts: list[tuple[Text, int]]) -> None:
        chunks = [PromptChunk(text.slot, text.done, text.done + count) for text, count in parts]
        metadata = PrefillMetadata(self._table, chunks, PAGE)
        cache.begin(metadata.spans)
        tokens = torch.tensor([token for text, count in parts for token in text.tokens[text.done :][:count]])
        hidden = self._model.forward(tokens.to(self._device), metadata.positions, metadata.bind(cache)).last
        for (text, count), logits in zip(parts, self._model.logits(hidden).split([n for _, n in parts]), strict=True):
            text.logits.append(logits)
            text.done += count

    def _verify(self, texts: list[Text], rows: int, *, is_tree: bool, rng: Random) -> None:
        """The next token of each text and draft tokens after it, right ones on the path to a random node."""
        parents = [random_parents(rng, rows, is_tree) for _ in texts]
        paths = [path_of(tree, rng.randrange(rows))[: text.left] for tree, text in zip(parents, texts, strict=True)]
        tokens = torch.tensor([[rng.randrange(self._config.vocab_size) for _ in range(rows)] for _ in texts])
        depths = torch.tensor([[len(path_of(tree, node)) - 1 for node in range(rows)] for tree in parents])
        for row, (text, path) in enumerate(zip(texts, paths, strict=True)):
            tokens[row, path] = torch.tensor(text.tokens[text.done :][: len(path)])
        lengths = torch.tensor([text.done for text in texts])
        slots = torch.tensor([text.slot for text in texts])
        masks = torch.tensor([ancestor_masks(tree) for tree in parents], device=self._device) if is_tree else None
        bound = rng.choice((None, int(lengths.max()) + rows))
        tokens, depths, lengths, slots = (x.to(self._device) for x in (tokens, depths, lengths, slots))
        metadata = DecodeMetadata(self._table, slots, lengths, rows, PAGE, bound, masks)
        hidden = self._model.forward(
            tokens.flatten(), (lengths[:, None] + depths).flatten(), metadata.bind(self._kv)
        ).last
        logits = self._model.logits(hidden).unflatten(0, (-1, rows))
        orders = torch.tensor([[*path, *sorted(set(range(rows)) - set(path))] for path in paths])
        accepted = torch.tensor([len(path) - 1 for path in paths], device=self._device)
        self._kv.commit(
            VerifiedRows(self._table, slots, lengths, accepted), orders.to(self._device)
        )  # of a chain 0, 1, ...
        for text, path, found in zip(texts, paths, logits, strict=True):
            text.logits.append(found[path])
            text.done += len(path)


def differing(company: Company, lengths: list[int], rng: Random, rounds: int) -> int:
    """At how many positions of random texts a bit of the logits differs between a prompt pass of the text alone and
    random company."""
    texts, found = [[rng.randrange(3, 37) for _ in range(length)] for length in lengths], 0
    with use_deterministic():
        alone = [company.alone(text) for text in texts]
        for _ in range(rounds):
            for one, other in zip(alone, company.together(texts, rng), strict=True):
                found += int((one.view(torch.uint8) != other.view(torch.uint8)).any(1).sum())
    return found
