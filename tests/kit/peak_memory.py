"""Peak memory of the GPU code path, measured on a CPU: kernels are stubs, their allocations count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from specbatch.kernels.attention.prefill.prompt_inputs import prompt_inputs_ref


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {item.untyped_storage()._cdata for item in tree_leaves(args) if isinstance(item, torch.Tensor)}
        found = func(*args, **(kwargs or {}))
        self._live = {key: item for key, item in self._live.items() if not item[0].expired()}
        for item in tree_leaves(found):
            if isinstance(item, torch.Tensor) and (storage := item.untyped_storage())._cdata not in known:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return found


def peak_of(run: Callable[[], Any]) -> int:
    """Bytes of the tensors that `run` makes and that are there at a time."""
    with torch.inference_mode(), _Watch() as watch:
        run()
    return watch.peak


def as_on_a_device(patch: pytest.MonkeyPatch) -> None:
    """Takes the code paths of GPU tensors, with kernels that compute nothing."""
    for kind in (JITFunction, InterpretedFunction):
        patch.setattr(kind, "run", lambda *_, **__: None)
    patch.setattr("specbatch.kernels.dispatch._forced", True)
    patch.setattr("specbatch.core.attention_metadata.prompt_inputs", prompt_inputs_ref)  # tokens must be valid
    patch.setattr("specbatch.kernels.gemm.linear.is_blocked", lambda dtype, device: False)
    patch.setattr("specbatch.kernels.gemm.dense.skinny_gemm_triton.is_skinny", lambda rows, weight: False)
