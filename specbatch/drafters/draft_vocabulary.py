"""The vocabulary of a draft model beside the target's: the same, of another padded size, or another one."""

from __future__ import annotations

import torch

from specbatch.kernels.sampling.argmax_topk import Scores
from specbatch.models.decoder import Decoder
from specbatch.text.shared_tokens import SharedTokens


class SameVocabulary:
    """Ids mean the same. Models of one family pad to different sizes.

    size  of the target's vocabulary
    ids   int64 [columns of `fit`], the target's tokens; None if they are these
    """

    ids: torch.Tensor | None = None

    def __init__(self, size: int, own: int) -> None:
        """own: size of the draft's vocabulary."""
        self.size = size
        self._own = own

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """The draft's tokens for the target's. A target with a larger padded vocabulary may choose a padding token,
        which the draft has no embedding for."""
        return tokens if self.reads_all else tokens.clamp(max=self._own - 1)

    @property
    def reads_all(self) -> bool:
        """Whether `read` returns all tokens as they are."""
        return self._own >= self.size

    def scores(self, model: Decoder, hidden: torch.Tensor, *, greedy: bool) -> Scores:
        """`Decoder.scores` of hidden [B, H], of the tokens that the target has, too; if `greedy`, tokens that the draft
        does not have may be missing."""
        return (
            model.scores(hidden, greedy=True) if greedy and self._own <= self.size else self.fit(model.logits(hidden))
        )

    def fit(self, logits: torch.Tensor) -> torch.Tensor:
        """Pad or cut the draft's logits [B, Vd] to the target's vocabulary; missing tokens get probability 0."""
        missing = self.size - self._own
        if missing <= 0:
            return logits[:, : self.size]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)


class OtherVocabulary(SameVocabulary):
    """Another tokenizer. Only tokens that both have are drafted, so that sampled drafts have a distribution over the
    target's tokens, and the target's distribution is kept."""

    reads_all = False

    def __init__(self, size: int, own: int, shared: SharedTokens, device: torch.device) -> None:
        super().__init__(size, own)
        # A tokenizer may have tokens that its model lacks.
        pairs = [pair for pair in zip(shared.target, shared.draft, strict=True) if pair[0] < size and pair[1] < own]
        self.ids, self._columns = torch.tensor(pairs, device=device).T.contiguous()
        self._read = torch.zeros(size, dtype=torch.int64, device=device)
        known = torch.tensor(shared.known[:size], device=device)
        self._read[: len(known)] = known.where(known < own, 0)

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._read[tokens]

    def scores(self, model: Decoder, hidden: torch.Tensor, *, greedy: bool) -> Scores:
        return self.fit(model.logits(hidden))

    def fit(self, logits: torch.Tensor) -> torch.Tensor:
        """The draft's logits [B, Vd] of the shared tokens."""
        return logits.index_select(1, self._columns)
