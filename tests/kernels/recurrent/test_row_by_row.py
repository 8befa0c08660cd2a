"""Kernels of the deterministic recurrences: no bit of a token depends on how its text is computed."""

from __future__ import annotations

from random import Random

import pytest
import torch
import triton
import triton.language as tl  # noqa: F401 (the interpreter looks for it)
from company import Company, differing
from crossed import first_quick

from specbatch.kernels.dispatch import force_kernels
from specbatch.kernels.recurrent import gated_delta_prefill_triton, mamba2_triton, row_by_row_triton
from specbatch.kernels.recurrent.short_conv import conv_prefill_ref
from specbatch.models.layers import recurrent

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16


def _run_kernels(patch: pytest.MonkeyPatch) -> None:
    """Of recurrent layers; the rest of a model runs the references, which are deterministic, too."""
    for name in ("delta_prefill", "delta_verify", "ssd_prefill", "ssd_verify", "conv_prefill", "conv_verify"):
        patch.setattr(recurrent, name, force_kernels()(getattr(recurrent, name)))


def _differing(device: torch.device, name: str, dtype: torch.dtype, state: str, lengths: list[int], rounds: int) -> int:
    if device.type == "cuda" and dtype == FP32:
        dtype = BF16  # attention and GEMMs of float32 are not deterministic there
    return differing(Company(name, dtype, state, device), lengths, Random(f"{name} {dtype}"), rounds)


@pytest.mark.parametrize("name", first_quick(2, ["qwen3.5", "lfm2", "nemotron-h"]))
def test_logits_do_not_depend_on_company(device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _run_kernels(monkeypatch)
    assert _differing(device, name, FP32, "fp32", [5, 3], 1) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "state"), [(FP32, "fp32"), (FP32, "bf16"), (FP16, "fp16")])
@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5", "nemotron-h", "lfm2"])
def test_longer_texts(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, state: str
) -> None:
    _run_kernels(monkeypatch)
    assert _differing(device, name, dtype, state, [40, 9, 23], 2) == 0


@triton.jit
def _not_rounded(s, fade, k, u, stored):
    return s * fade + k[:, None] * u[None, :]


# What takes the place of the code that follows a rule (owner, name, replacement), and a model that shows it.
WITHOUT = {
    "chunks of the delta rule": (
        (recurrent, "delta_prefill", gated_delta_prefill_triton.delta_prefill),
        "qwen3.5",
        "fp32",
    ),
    "verify of Mamba-2 at once": ((recurrent, "ssd_verify", mamba2_triton.ssd_verify), "nemotron-h", "fp32"),
    "states rounded when stored": ((row_by_row_triton, "_delta_update", _not_rounded), "qwen3.5", "bf16"),
    "order of taps": ((recurrent, "conv_prefill", conv_prefill_ref), "lfm2", "fp32"),  # a prompt adds the oldest first
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", WITHOUT)
def test_every_rule_is_needed(device: torch.device, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    if device.type == "cuda" and rule in ("states rounded when stored", "order of taps"):
        pytest.skip("bfloat16 hides what this changes, and float32 is not deterministic on a GPU")
    change, name, state = WITHOUT[rule]
    _run_kernels(monkeypatch)
    monkeypatch.setattr(*change)
    assert _differing(device, name, FP32, state, [40, 23], 1) > 0
