"""For tests of `specbatch check`: configurations of tiny engines, and faults in passes that verify drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from targets import MTP, SPECULATIONS, Targets

from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation
from specbatch.core.attention_metadata import BoundDecode
from specbatch.core.device_batch import DeviceBatch
from specbatch.engine.device import acceptance
from specbatch.engine.device.step import DecodeStep
from specbatch.kernels.attention.qkv import split_qkv_rope_ref
from specbatch.kernels.attention.verify import verify_attention
from specbatch.kernels.gemm.linear import Linear
from specbatch.kernels.gemm.quantized.grouped import GroupedLinear
from specbatch.kernels.recurrent.state_replay import StateReplay


def config_of(targets: Targets, target: str, drafter: str, **changes: Any) -> EngineConfig:
    """An engine of one of `TARGETS` with one of `SPECULATIONS`. changes: of EngineConfig, and `schedule`."""
    speculation = {"schedule": changes.pop("schedule", "v2"), **SPECULATIONS[drafter]}
    if speculation.get("algorithm") == "eagle":
        speculation["draft"] = targets.eagle(target)
    dummy = speculation.get("draft") == "dummy" or (drafter.startswith("mtp") and target not in MTP)
    settings = {"page_size": 4, "device": "cpu", "load_format": "dummy" if dummy else "auto"} | changes
    return EngineConfig(model=target, speculation=Speculation(**speculation), **settings)


Fault = Callable[[pytest.MonkeyPatch], None]


def stale_kv(patch: pytest.MonkeyPatch) -> None:
    """The root's key and value are not written: a rejected draft's stay in its place."""
    split = verify_attention.split_qkv_rope_write_ref

    def without_root(inputs: Any, slots: torch.Tensor, count: int) -> Any:
        if count > 1:
            slots = slots.clone()
            slots.view(-1, count)[:, 0] = 0  # of the padding page
        return split(inputs, slots)

    _in_verifies(patch, without_root)


def position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Verified tokens are one position too far from the prompt."""
    stage = DeviceBatch.stage

    def later(self: Any, slots: Any, drafts: torch.Tensor, ancestors: Any) -> Any:
        tokens, positions = stage(self, slots, drafts, ancestors)
        return tokens, positions + (drafts.shape[1] > 0)

    patch.setattr(DeviceBatch, "stage", later)


def rope_offset_of_queries(patch: pytest.MonkeyPatch) -> None:
    """Queries of a verify are rotated one position too far, keys are not."""
    split = verify_attention.split_qkv_rope_write_ref

    def turned(inputs: Any, slots: torch.Tensor, count: int) -> Any:
        qkv, heads, positions, *_ = inputs
        far = split_qkv_rope_ref(qkv, heads, positions + 1)[0] if count > 1 else None
        q, *others = split(inputs, slots)
        return q if far is None else far, *others

    _in_verifies(patch, turned)


def _in_verifies(patch: pytest.MonkeyPatch, changed: Callable[[Any, torch.Tensor, int], Any]) -> None:
    """changed: (inputs of attention, slots of its tokens, tokens of each request) to queries, keys and values"""
    call = verify_attention.DecodeAttentionRef.__call__

    def wrong(self: Any, *arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(
                verify_attention,
                "split_qkv_rope_write_ref",
                lambda inputs, slots: changed(inputs, slots, self._count),
            )
            return call(self, *arguments)

    patch.setattr(verify_attention.DecodeAttentionRef, "__call__", wrong)


def _accepts(patch: pytest.MonkeyPatch, change: Callable[[acceptance.RefResult, torch.Tensor, Any], Any]) -> None:
    """change: (what a verify accepts, its logits, its proposal) to what is accepted in place of that"""
    accept = acceptance.accept_ref

    def changed(logits: torch.Tensor, proposal: Any, *others: Any) -> Any:
        return change(acceptance.RefResult(*accept(logits, proposal, *others)), logits, proposal)

    patch.setattr(acceptance, "accept_ref", changed)


def every_draft_accepted(patch: pytest.MonkeyPatch) -> None:
    def accepted(found: acceptance.RefResult, logits: torch.Tensor, proposal: Any) -> acceptance.RefResult:
        tokens = torch.cat([proposal.tokens, found.tokens[:, -1:]], 1)
        return found._replace(tokens=tokens, accepted=torch.full_like(found.accepted, proposal.tokens.shape[1]))

    _accepts(patch, accepted)


def dropped_accepted_token(patch: pytest.MonkeyPatch) -> None:
    """The first of several accepted drafts is lost, its key and value stay."""

    def dropped(found: acceptance.RefResult, logits: torch.Tensor, proposal: Any) -> acceptance.RefResult:
        several = found.accepted > 1
        tokens = torch.cat([found.tokens[:, 1:], found.tokens[:, -1:]], 1)
        return found._replace(
            tokens=torch.where(several[:, None], tokens, found.tokens), accepted=found.accepted - several.long()
        )

    _accepts(patch, dropped)


def one_wrong_token(patch: pytest.MonkeyPatch) -> None:
    """In one verify of drafts, the seventh, one request gets the third best token."""
    calls = {"count": 0}

    def wrong(found: acceptance.RefResult, logits: torch.Tensor, proposal: Any) -> acceptance.RefResult:
        calls["count"] += proposal.tokens.shape[1] > 0
        if calls["count"] == 7 and proposal.tokens.shape[1]:
            tokens, accepted = found.tokens.clone(), found.accepted.clone()
            tokens[0, 0] = logits.view(len(tokens), -1, logits.shape[-1])[0, 0].topk(3).indices[2]
            accepted[0] = 0
            found = found._replace(tokens=tokens, accepted=accepted)
        return found

    _accepts(patch, wrong)


def wrong_block_scale(patch: pytest.MonkeyPatch, factor: float = 2.0, layer: int = 0) -> None:
    """Of a layer's last matrix one block of 128 x 128 values is too large in a verify."""
    verify, wrong = DecodeStep.verify, list[Any]()

    def verified(self: Any, step: Any, proposal: Any, *arguments: Any) -> Any:
        if proposal.tokens.shape[1]:
            wrong.append(self.model.layers[layer].mlps[-1].down)
        try:
            return verify(self, step, proposal, *arguments)
        finally:
            wrong.clear()

    def scaled(call: Callable[..., torch.Tensor], self: Any, x: torch.Tensor, *others: Any, **named: Any) -> Any:
        more = None
        if wrong and self is wrong[0]:
            alone = torch.zeros_like(x)
            alone[:, :128] = x[:, :128]
            more = call(self, alone)[:, :128]
        found = call(self, x, *others, **named)
        if more is not None:
            found[:, :128] += (factor - 1) * more
        return found

    patch.setattr(DecodeStep, "verify", verified)
    for kind in (Linear, GroupedLinear):
        patch.setattr(
            kind, "__call__", lambda self, *given, call=kind.__call__, **named: scaled(call, self, *given, **named)
        )


def state_not_rolled_back(patch: pytest.MonkeyPatch) -> None:
    """The state of the first recurrent layer advances over rejected drafts, too."""
    recur = BoundDecode.recur

    def ahead(self: Any, layer: int, projected: Any, mixer: Any) -> Any:
        states = self.cache.states
        if layer or self.metadata.num_queries == 1:
            return recur(self, layer, projected, mixer)
        count, rows = states._count, self.metadata.num_queries
        every = StateReplay(self.metadata.slots, (count > 0) * rows, states._kept, self.metadata.ancestors)
        return mixer.verify(projected, states.layers[layer], every)

    patch.setattr(BoundDecode, "recur", ahead)
