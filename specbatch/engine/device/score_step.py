"""Scoring on the device: texts through the target as prompts, and the log-probabilities of given tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from specbatch.core.attention_metadata import PrefillMetadata, PromptChunk
from specbatch.core.device_batch import DeviceBatch
from specbatch.kernels.common.rowwise import logsumexp
from specbatch.kernels.common.upload import upload
from specbatch.kernels.gemm.quantized.fp8_activations import use_fp8_activations
from specbatch.models.decoder import Decoder
from specbatch.runtime.prefill_forward import Forward

_BYTES_PER_LOGIT = 16  # in the model's type, as float32, and for the sum of their exponentials


@dataclass(frozen=True)
class ScoreWork:
    """One pass over texts, as plain data.

    tokens   of the chunks, concatenated
    read     indices of the tokens whose logits are needed, ascending
    targets  (index into `read`, token): tokens to score, ascending
    """

    chunks: list[PromptChunk]
    tokens: list[int]
    read: list[int]
    targets: list[tuple[int, int]]


@dataclass
class ScoreStep:
    """Runs scoring passes over the target, in the batch's pages.

    workspace         bytes that the logits may take: what the activations of their pass have left
    needs_all_hidden  `forward` returns the hidden states of all tokens
    fp8               see `use_fp8_activations`
    """

    batch: DeviceBatch
    model: Decoder
    forward: Forward
    page_size: int
    workspace: int
    needs_all_hidden: bool
    fp8: bool = False

    def __call__(self, work: ScoreWork) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """In parts, for the targets in order: float32 log-probabilities, and whether each is the greedy token."""
        device = self.batch.device
        metadata = PrefillMetadata(self.batch.page_table, work.chunks, self.page_size)
        with use_fp8_activations(self.fp8):
            tokens = upload(work.tokens, device)
            last = self.forward(metadata, None if self.needs_all_hidden else work.read, tokens).last
        hidden = last[upload(work.read, device)] if self.needs_all_hidden else last
        return list(target_logprobs(self.model, hidden, work.targets, self.workspace))


def target_logprobs(
    model: Decoder, hidden: torch.Tensor, targets: list[tuple[int, int]], workspace: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """In parts, for targets (row of hidden [n, hidden_size], token), ascending: float32 log-probabilities, and whether
    each is the greedy token. workspace: bytes that the logits of a part may take."""
    if not targets:
        return
    places = [row for row, _ in targets]
    rows, tokens = upload(targets, hidden.device).unbind(1)
    most = max(1, workspace // (_BYTES_PER_LOGIT * model.config.vocab_size))  # rows of logits at a time
    for first in range(0, len(hidden), most):
        begin, end = (bisect_left(places, place) for place in (first, first + most))
        row, token = rows[begin:end] - first, tokens[begin:end]
        logits = model.logits(hidden[first : first + most])
        greedy = logits.argmax(-1)[row] == token
        logits = logits.float()
        yield logits[row, token] - logsumexp(logits)[row], greedy
