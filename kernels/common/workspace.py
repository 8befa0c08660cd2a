"""Scratch memory of kernels whose programs share their work: partial sums and arrival counters."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class _Workspace:
    """Partial sums and counters of a device. What was handed out stays alive: a captured graph may hold it."""

    partials: list[torch.Tensor] = field(default_factory=list)
    arrivals: list[torch.Tensor] = field(default_factory=list)

    def take(self, device: torch.device, partials: int, arrivals: int) -> tuple[torch.Tensor, torch.Tensor]:
        for kept, size, dtype in ((self.partials, partials, torch.float32), (self.arrivals, arrivals, torch.int32)):
            if not kept or kept[-1].numel() < size:
                if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    raise RuntimeError("the workspace is too small for this capture: run the kernel once before it")
                with torch.inference_mode(False):  # writable in and outside inference mode
                    kept.append(torch.zeros(1 << max(0, size - 1).bit_length(), dtype=dtype, device=device))
        return self.partials[-1], self.arrivals[-1]


_workspaces: dict[torch.device, _Workspace] = {}


def reserve(device: torch.device, partials: int, arrivals: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 of at least `partials` elements, and at least `arrivals` int32 counters that are 0, which a kernel leaves
    at 0.

    Launches that share a device's workspace must follow each other on one stream.
    """
    return _workspaces.setdefault(device, _Workspace()).take(device, partials, arrivals)
