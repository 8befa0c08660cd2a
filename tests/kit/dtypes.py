"""Types that kernels are tested with."""

from __future__ import annotations

import torch

# Triton's interpreter computes wrong bfloat16 matmuls and cannot store bfloat16.
HALVES = [torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]
DTYPES = [torch.float32, *HALVES]
