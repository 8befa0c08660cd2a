"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension, the flavour of Llama and Qwen2/3.

    x [..., H], weight [H]. Normalised in float32, cast to the type of x, then multiplied by the weight.
    Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return weight * F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype)
