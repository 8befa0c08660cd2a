"""Kernels compile for the GPUs that they are made for: deterministic ones, of gpt-oss, of few rows, of quantized
weights, of collectives, of verify budgets, of short chains of recurrent layers, of shared prefixes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KIT = Path(__file__).parents[1] / "kit"
SHARED = 227 << 10  # bytes of a program on Hopper


def compiled(script: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, KIT / script], capture_output=True, text=True, env=environment, check=False)
    if "ptxas" in done.stderr and "not found" in done.stderr.lower():
        pytest.skip("Triton was installed without its assembler")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(kernel: dict[str, Any]) -> None:
    is_of_halves = not kernel["name"].startswith("FP32") and "shot" not in kernel["name"]
    assert bool(kernel["instructions"]) == is_of_halves, f"{kernel['name']}: tensor cores are for half precision"
    assert kernel["shared"] <= SHARED, f"{kernel['name']} needs {kernel['shared']} bytes of shared memory"
    if "FP8" not in kernel["name"]:  # of which each element is converted by itself
        # The compiler may put any elements of a thread together, and the assembly would not know which.
        assert kernel["together"] <= 2, f"{kernel['name']}: assembly takes {kernel['together']} elements"


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    found = compiled("compiled.py")
    assert len(found) == 76
    for kernel in found:
        check(kernel)
        if kernel["name"].startswith("FP8 keys with scales"):  # new keys fill no registers of the loop over old ones
            assert not kernel["stack"], f"{kernel['name']} spills registers"
            assert kernel["copies"] <= 2, f"{kernel['name']} attends to new keys in the loop over old ones"


@pytest.mark.slow
def test_kernels_of_quantized_weights_compile_for_hopper() -> None:
    found = compiled("compiled_quantized.py")
    assert len(found) == 40
    for kernel in found:
        check(kernel)
        assert kernel["instructions"] == ["wgmma"]
        # Few rows of 16 bits are put in another order: 16 stores at most, where weights would be 32. With an early
        # pipeline those in FP8 come by way of registers, in at most 2.
        few = re.search("FP8 GEMM of (4|16|32) rows", kernel["name"])
        is_early = re.search("FP8 GEMM of (4|16) rows in FP8", kernel["name"]) is not None
        most = 2 if is_early else 16 if few and "in FP8" not in kernel["name"] else 0
        assert bool(kernel["copied_early"]) == is_early, f"{kernel['name']}: copies before the wait"
        assert bool(kernel["fetched_early"]) != is_early or not few, f"{kernel['name']}: weights before the wait"
        assert kernel["copies"] <= most, f"{kernel['name']}: weights go through shared memory twice"
        # A thread has two rows of the 64, and with blocks one scale of the weight. Triton 3.6 loads scales of the shape
        # [rows, 1] once for each column of a result.
        is_many = "FP8 GEMM of 64 rows" in kernel["name"]
        assert not is_many or kernel["loads"] <= 3, f"{kernel['name']}: {kernel['loads']} loads of scales in a step"
        # A tile of 128 rows fills the registers. For most matrices it is still faster than two of 64.
        spilled = 64 if "INT4 GEMM of 128 rows" in kernel["name"] else 0
        assert kernel["stack"] <= spilled, f"{kernel['name']} spills registers"


@pytest.mark.slow
def test_gemms_of_few_rows_compile_for_hopper() -> None:
    """A program of one row reads all that it needs of the weight before it waits for the previous kernel."""
    found = compiled("compiled_few_rows.py")
    assert len(found) == 40
    for kernel in found:
        name = kernel["name"]
        assert not kernel["stack"], f"{name} spills registers"
        assert kernel["shared"] <= SHARED, f"{name} needs {kernel['shared']} bytes of shared memory"
        if name.startswith("one row"):
            assert not kernel["instructions"], f"{name}: a tensor core would need 8 rows"
            assert kernel["early"] == kernel["expected"], f"{name}: {kernel['early']} loads before the wait"
            assert kernel["registers"] <= 168, f"{name}: {kernel['registers']} registers"
        if name.startswith("32 rows"):
            assert kernel["instructions"] == ["wgmma"], f"{name}: 64 rows of the weight fill an instruction"


@pytest.mark.slow
def test_kernels_of_verify_budgets_compile_for_hopper() -> None:
    found = compiled("compiled_budgets.py")
    assert len(found) == 5
    for kernel in found:
        assert not kernel["instructions"], f"{kernel['name']} multiplies no matrices"
        assert kernel["shared"] <= SHARED, f"{kernel['name']} needs {kernel['shared']} bytes of shared memory"


@pytest.mark.slow
def test_variants_of_recurrences_add_in_one_order() -> None:
    """The layout of a sum decides its order, and an assembler that fuses additions its rounding."""
    sums: dict[str, list[str]] = {}
    found = compiled("compiled_recurrences.py")
    assert len(found) == 18
    for kernel in found:
        name = kernel["name"]
        assert kernel["sums"] == sums.setdefault(name, kernel["sums"]), f"{name}: {kernel['variant']} adds differently"
        assert kernel["sums"] or name == "convolution", f"{name}: no sum was found"
        assert not kernel["fusible"], f"{name}: {kernel['variant']} may be fused"


@pytest.mark.slow
def test_kernels_of_short_chains_compile_for_hopper() -> None:
    """They read states, and what the last verify kept, before they wait for the previous kernel."""
    found = compiled("compiled_chains.py")
    assert len(found) == 6
    for kernel in found:
        name = kernel["name"]
        assert not kernel["stack"], f"{name} spills registers"
        assert kernel["early"] >= 29, f"{name}: {kernel['early']} loads before the wait"
        assert (kernel["instructions"] == ["mma"]) == name.startswith("chain of the gated"), f"{name}: tensor cores"


@pytest.mark.slow
def test_attention_with_shared_prefixes_compiles_for_hopper() -> None:
    """In the interpreter, variables may change their shape."""
    found = compiled("compiled_prefixes.py")
    assert len(found) == 18
    for kernel in found:
        name = kernel["name"]
        assert kernel["shared"] <= SHARED, f"{name} needs {kernel['shared']} bytes of shared memory"
        wanted = ["mma"] if "own" in name else ["wgmma"] if name.startswith(("attention", "Gluon")) else []
        assert kernel["instructions"] == wanted, f"{name}: tensor cores"
        assert not kernel["stack"] or "merge" not in name, f"{name} spills registers"


@pytest.mark.slow
def test_prefill_attention_compiles_for_hopper() -> None:
    """The softmax of a block is computed while the tensor cores multiply, which the assembler is free to undo."""
    found = compiled("compiled_prompts.py")
    assert len(found) == 4
    for kernel in found:
        assert kernel["shared"] <= SHARED, f"{kernel['name']} needs {kernel['shared']} bytes of shared memory"
        assert not kernel["spills"], f"{kernel['name']} spills registers in the main loop"
        assert kernel["early"] == kernel["exponentials"] > 0, f"{kernel['name']}: exponentials after the wait"
