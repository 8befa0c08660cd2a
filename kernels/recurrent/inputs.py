"""Arguments of recurrent layers: head layouts, the inputs and states of a layer, and what a verify leaves pending.

References and Triton kernels import these types, and none of them is imported here. A verify's `StateReplay` has a
module of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from specbatch.kernels.gemm.linear import Norm

CHUNK = 64  # rows of a prompt that the gated delta rule computes together
EXACT_CHUNK = 16  # of float32 in kernels: exact dot products take many registers
MOST_TAPS = 17  # of a convolution: the first tile of a prompt pass, of 16 tokens, is the only one that sees a window


@dataclass(frozen=True)
class DeltaHeads:
    """A layer's `keys` heads of q and k of `key_dim`, and `values` heads of v of `value_dim`, some for each key head.

    Consecutive value heads share a key head. a_log, dt_bias: float32 [values]; norm: RMSNorm weight [value_dim] with
    `eps`, of each head on its own.
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float

    def outputs(self, qkv: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """The memory for the outputs [T, values, value_dim]: that of `out` if given, else new."""
        assert out is None or out.is_contiguous(), "out must be contiguous"
        shape = len(qkv), self.values, self.value_dim
        return qkv.new_empty(shape) if out is None else out.view(shape)


class DeltaInputs(NamedTuple):
    """Inputs of T tokens to the gated delta rule, columns of wider GEMM outputs (any row stride), and a layer's state.

    qkv    [T, 2 keys * key_dim + values * value_dim], convolved
    z      [T, values * value_dim]
    b, a   [T, values]
    state  [R, values, key_dim, value_dim] of all device rows
    """

    qkv: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    heads: DeltaHeads
    state: torch.Tensor

    @property
    def is_cuda(self) -> bool:
        return self.qkv.is_cuda


class Pending(NamedTuple):
    """What a verify of up to M rows leaves of them, in any types of float (float32 keeps a state exact).

    k [R, M, keys, key_dim], normalised; u [R, M, values, value_dim]; g [R, M, values].
    """

    k: torch.Tensor
    u: torch.Tensor
    g: torch.Tensor


def chunk_bytes(dtype: torch.dtype) -> int:
    """Of a prompt's token and value head, in kernels: a row of a chunk's two matrices, and a sum of decays."""
    rows = EXACT_CHUNK * 4 if dtype == torch.float32 else CHUNK * 2
    return 2 * rows + 4


@dataclass(frozen=True)
class SsdHeads:
    """`count` heads of `dim`; B and C of size `state` for each of `groups` groups of neighbouring heads.

    a_log (A = -e^a_log), d, dt_bias: float32 [count]. norm: weight [count * dim]; each group's columns are normalised
    for themselves.
    """

    count: int
    dim: int
    groups: int
    state: int
    a_log: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor
    norm: Norm

    @property
    def columns(self) -> tuple[int, int, int]:
        """Of x, B and C in a row of the convolution's outputs, and in this order."""
        return self.count * self.dim, self.groups * self.state, self.groups * self.state

    def outputs(self, xbc: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """The memory for the outputs [T, count * dim]: that of `out` if given, else new."""
        assert out is None or out.is_contiguous(), "out must be contiguous"
        return xbc.new_empty(len(xbc), self.columns[0]) if out is None else out


class SsdMemory(NamedTuple):
    """One layer's state of all R device rows.

    state [R, count, dim, n], float32, bfloat16 or float16; pending [R, M, count * dim + groups * n + count], in the
    type of the activations: x, B and dt (as projected) of the last verify's rows.
    """

    state: torch.Tensor
    pending: torch.Tensor


class SsdInputs(NamedTuple):
    """Inputs of T tokens to Mamba2, columns of wider GEMM outputs: xbc [T, columns], convolved, dt [T, count] and z [T,
    count * dim]."""

    xbc: torch.Tensor
    dt: torch.Tensor
    z: torch.Tensor
    heads: SsdHeads
    memory: SsdMemory

    @property
    def is_cuda(self) -> bool:
        return self.xbc.is_cuda


class ConvInputs(NamedTuple):
    """Inputs of T tokens to a causal convolution of K taps, and the window that is its state.

    x       [T, C], as the gates `before` and `after`, which multiply its input and its output; None: no gate
    weight  [C, K]; bias [C] or None. activation: silu at the end
    window  [R, K - 1, C] of all device rows, the oldest input first
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    window: torch.Tensor
    activation: bool
    before: torch.Tensor | None = None
    after: torch.Tensor | None = None

    @property
    def is_cuda(self) -> bool:
        return self.x.is_cuda
