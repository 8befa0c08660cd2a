"""Compiles the kernels of verify budgets for Hopper, as compiled.py does others. Prints the same lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import triton
from compiled import compiled

from specbatch.kernels.sampling import accept_triton as accepts
from specbatch.kernels.sampling import verify_budget as budget_refs
from specbatch.kernels.sampling import verify_budget_triton as budgets


def spending(batch: int, drafts: int, *, has_confidence: bool) -> dict[str, Any]:
    """The choice of drafts of a sampled step."""
    kinds = dict.fromkeys(("counts", "slots", "drafted", "verified", "levels", "places", "rows", "firsts"), "*i64")
    kinds |= dict.fromkeys(("recent", "confidence", "temperature", "values"), "*fp32")
    kinds |= dict.fromkeys(("batch", "total", "columns", "spacing", "draft_spacing"), "i32")
    block, nodes = triton.next_power_of_2(batch), triton.next_power_of_2(drafts + 1)
    fixed: dict[str, Any] = {
        "DRAFTS": drafts, "BATCH": block, "NODES": nodes, "VALUE_BITS": budgets.VALUE_BITS,
        "TIE_BITS": (block * nodes).bit_length() - 1, "PDL": True,
    }  # fmt: skip
    fixed |= {name: getattr(budget_refs, name) for name in ("LEVELS", "PLACES", "WEIGHT", "GUESS", "GUESSED")}
    fixed |= {} if has_confidence else {"confidence": None, "values": None}
    warps = budgets.warps_for(block * nodes)
    return compiled(budgets.spend_kernel, kinds, fixed, num_warps=warps, enable_fp_fusion=False)


def argmax_with_sums() -> dict[str, Any]:
    kinds = {"logits": "*bf16", "partials": "*i64", "sums": "*fp32"}
    kinds |= dict.fromkeys(("vocabulary", "first", "group", "outer", "inner", "chunks", "steps"), "i32")
    return compiled(accepts.argmax_kernel, kinds, {"BLOCK": 2048, "PDL": True}, num_warps=4)


def learning(drafts: int) -> dict[str, Any]:
    kinds = dict.fromkeys(("counts", "slots", "verified", "levels", "accepted"), "*i64") | {"recent": "*fp32"}
    kinds |= dict.fromkeys(("batch", "columns", "spacing"), "i32")
    fixed = {"DRAFTS": drafts, "KINDS": budget_refs.KINDS, "BLOCK": 1024, "PDL": True}
    fixed |= {"MOST": budget_refs.MOST, "MEMORY": budget_refs.MEMORY}
    return compiled(budgets.learn_kernel, kinds, fixed, num_warps=4, enable_fp_fusion=False)


def every() -> Iterator[tuple[str, dict[str, Any]]]:
    for batch, drafts, has_confidence in ((1, 1, False), (128, 15, True), (512, 63, True)):
        yield f"{batch} x {drafts} drafts", spending(batch, drafts, has_confidence=has_confidence)
    yield "learning", learning(15)
    yield "argmax and its probability", argmax_with_sums()


if __name__ == "__main__":
    for name, found in every():
        print(json.dumps({"name": name, **found}))
