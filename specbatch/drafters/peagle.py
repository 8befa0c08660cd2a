"""P-EAGLE drafting: an EAGLE-3 head that makes all drafts in one pass, from the newest pair and masked places after it.

Hui et al., "P-EAGLE: Parallel-Drafting EAGLE with Scalable Training" (arXiv 2602.01469); vLLM (#32887). A masked place
has the embedding of the mask token, and in place of features the learned vector `mask_hidden`. The place d after the
newest pair drafts the token d + 2 after that pair's feature. Places attend to the pairs before them and to each other,
causally, so the drafts do not depend on each other.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from specbatch.config.draft_shape import MOST
from specbatch.core.attention_metadata import positions_from
from specbatch.core.step_input import Proposal, StepInput
from specbatch.drafters.base import DraftPlan, no_drafts
from specbatch.drafters.choose import choose_at_once
from specbatch.drafters.eagle3 import Kind, eagle3_plan
from specbatch.drafters.feature_head import FeatureChain
from specbatch.errors import refuse
from specbatch.files.config_values import count_of, table_of
from specbatch.kernels.sampling.argmax_topk import Scores
from specbatch.models.config import ModelConfig
from specbatch.models.heads.draft_head import DraftHead
from specbatch.weights.draft_heads import DraftFiles

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig
    from specbatch.weights import Checkpoint, Log

_MASK_KEYS = ("pard_token", "ptd_token_id", "mask_token_id")  # as vLLM looks for it


class ParallelChain(FeatureChain):
    def __init__(self, head: DraftHead, *how: Any, mask_token: int, mask_hidden: torch.Tensor) -> None:
        """mask_hidden: `width` values in any shape; the others are as for `FeatureChain`."""
        super().__init__(head, *how)
        like = head.embedding
        self._mask_hidden = head.project(mask_hidden.reshape(1, -1).to(like))
        self._mask_embedding = head.embed(torch.tensor([mask_token], device=like.device))

    def propose(self, step: StepInput) -> Proposal:
        count = step.num_drafts
        if not count:
            self._write(step)
            return no_drafts(step)
        hidden = self._filled(step).flatten(0, 1)
        scores: Scores = self.scores(hidden, step).unflatten(0, (-1, count))
        return choose_at_once(scores, step, ids=self.head.vocabulary, vocabulary=self._vocabulary)

    def _filled(self, step: StepInput) -> torch.Tensor:
        """Run the buffered pairs and the masked places after them. Returns hidden states [B, num_drafts, hidden_size]
        of the newest pair and of the masked places.

        All rows after the ready pairs are masked; those after the last draft are computed and ignored.
        """
        count, most = step.num_drafts, min(step.num_drafts + 1, self._waiting.shape[1])
        due, rows = self._due(step, most), most + count - 1
        place = torch.arange(rows, device=step.slots.device)
        ready = self._ready[step.slots, None]
        is_pair = (place < ready)[:, :, None]

        def masked(pairs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            pairs = torch.nn.functional.pad(pairs.unflatten(0, (-1, most)), (0, 0, 0, count - 1))
            return torch.where(is_pair, pairs, mask).flatten(0, 1)

        # The ignored rows may be beyond the bound of the step.
        most_keys = min(step.bound + rows, step.batch.page_table.shape[1] * step.page_size)
        metadata = replace(step.decode_metadata(due.start, rows), bound=most_keys)
        first = torch.arange(len(ready), device=place.device)[:, None] * rows + ready - 1
        hidden = self._run(
            metadata,
            masked(due.embedded, self._mask_embedding),
            masked(due.hidden, self._mask_hidden),
            positions_from(due.start, rows).flatten(),
            (first + place[:count]).flatten(),
        )
        out: torch.Tensor = hidden.unflatten(0, (-1, count))
        return out


def plan(target: Checkpoint, config: EngineConfig, log: Log) -> DraftPlan:
    """The draft is a checkpoint of speculators, or of vLLM's layout as NeMo Automodel writes it. Raises SpecbatchError
    if it does not fit the target."""

    def chain(files: DraftFiles) -> partial[ParallelChain]:
        token = _mask_token(files.config)
        if token >= target.config.vocab_size:
            works = f"the target has {target.config.vocab_size} tokens; the head was trained for another one"
            raise refuse("mask_token_id", token, works)
        hidden = files.tensor("mask_hidden")
        if not hidden.isfinite().all():
            raise refuse("draft", "mask_hidden", "the tensor holds values that are not finite; the file is damaged")
        return partial(ParallelChain, mask_token=token, mask_hidden=hidden)

    steps, most = config.speculation.shape.steps, (MOST + 1) // 2
    if steps > most:
        raise refuse("draft_tokens", steps, f"the pass of a P-EAGLE head has two rows for each; use at most {most}")
    found = eagle3_plan(target, config, log, Kind(chain, most, _usual, masked=True))
    return replace(found, scratch_slots=2 * (found.num_drafts or steps))  # with the ignored rows


def _usual(target: ModelConfig) -> dict[str, Any]:
    """Two layers, as the head of AWS for GPT-OSS has."""
    return {"num_hidden_layers": 2, "mask_token_id": target.vocab_size - 1}


def _mask_token(config: dict[str, Any]) -> int:
    for key in _MASK_KEYS:
        if config.get(key) is not None:
            return count_of(config, key, least=0)
    inside = table_of(config, "dflash_config")
    if inside.get("mask_token_id") is None:
        raise refuse("mask_token_id", None, f"the head's config must have one of {', '.join(_MASK_KEYS)}")
    return count_of(inside, "mask_token_id", least=0)
