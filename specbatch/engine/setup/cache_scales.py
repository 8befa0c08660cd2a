"""How an engine's FP8 KV cache stores keys and values: with the scales of the checkpoint, or with computed ones."""

from __future__ import annotations

import time

import torch

from specbatch.kernels.collectives.communicator import Communicator
from specbatch.models.cache_calibration import TOKENS, CacheCalibration, calibrate_cache
from specbatch.models.decoder import Decoder
from specbatch.models.partition import part_of
from specbatch.weights import Checkpoint, Log
from specbatch.weights.cache_scales import read_cache_scales


def stored_cache(target: Checkpoint, model: Decoder, ranks: Communicator | None, log: Log) -> CacheCalibration:
    """For the KV heads of this rank, on its device. model: its part of the target."""
    start, found = time.perf_counter(), read_cache_scales(target)
    if found is None:
        stored = calibrate_cache(model)
        source = f"computed from {TOKENS} tokens in {time.perf_counter() - start:.1f} s"
    else:
        shape, rank, size = (model.kv_layers, model.config.num_kv_heads), 0, 1
        if ranks is not None:
            rank, size = ranks.rank, ranks.size
        k, v = (part_of(scales, shape, rank, size).to(model.device).contiguous() for scales in found)
        stored, source = CacheCalibration(k, v, {}), "the checkpoint's scales"
    log(f"KV cache: FP8, keys / {_range(stored.k_scales)} and values / {_range(stored.v_scales)}, {source}")
    return stored


def _range(scales: torch.Tensor) -> str:
    least, most = (f"{float(scale):.3g}" for scale in scales.aminmax())
    return least if least == most else f"{least} to {most}"
