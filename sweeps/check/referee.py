"""The referee of a check: the model alone, without engine, cache or drafts, as the judge of tokens that differ.

A text passes through the model as a whole, with torch's attention. In FP32 rounding moves its logits by a thousandth of
what it moves them by in BF16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specbatch import weights
from specbatch.config.draft_shape import AUTO
from specbatch.config.engine_config import EngineConfig
from specbatch.errors import refuse
from specbatch.kernels.gemm.quantized.fp8_activations import use_fp8_activations
from specbatch.memory.capacity import usual_fraction
from specbatch.memory.planner import available_memory, size_text
from specbatch.models.decoder import Decoder
from specbatch.models.full_forward import UncachedContext
from specbatch.runtime.device import find_device, find_dtype
from specbatch.runtime.loader import quantizes_activations, weight_bytes
from specbatch.sweeps.check.verdict import Places

LOGIT_ROWS = 256  # computed at a time


@dataclass(frozen=True)
class RefereePlan:
    """Where and in which type the referee runs. engine_dtype: that of the engines that it judges."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    engine_dtype: torch.dtype
    has_quantized_weights: bool = False


def plan_referee(config: EngineConfig, name: str) -> RefereePlan:
    """The referee called `name`: float32, or same for the engines' type.

    The engines are closed before it is loaded, so it may use the memory that is free before they are loaded. Refuses
    one whose weights do not fit.
    """
    device = find_device(config.device)
    model = _open(config, device).config
    own = find_dtype(config.dtype, model.dtype, device)
    dtype = torch.float32 if name == "float32" else own
    free = available_memory(device)
    need, least = (weight_bytes(model, each, device) for each in (dtype, own))
    fraction = config.memory_fraction
    room = int((usual_fraction(free, on_cpu=device.type == "cpu") if fraction == AUTO else fraction) * free)
    if need > room:
        works = f"use same, with {size_text(least)} of weights" if least <= room and dtype != own else "use none"
        found = f"its weights take {size_text(need)} of the {size_text(room)} that may be used on {device}"
        raise refuse("referee", name, f"{found}; {works}, or a smaller model")
    return RefereePlan(config, device, dtype, own, has_quantized_weights=model.quantization is not None)


class Referee:
    """The model of a plan. longest: tokens of the longest text."""

    def __init__(self, plan: RefereePlan, longest: int) -> None:
        checkpoint = _open(plan.config, plan.device)
        self._model = Decoder(
            checkpoint.config, checkpoint.tensor, dtype=plan.dtype, device=plan.device, max_positions=longest
        )
        self._fp8 = quantizes_activations(plan.config.fp8_activations, plan.dtype, plan.device, checkpoint.config)

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Places:
        """The tokens of an answer, each after the prompt and the tokens before it."""
        if not answer:
            return Places([], [], [])
        below: list[float] = []
        scale: list[float] = []
        logprobs: list[float] = []
        hidden = self._hidden([*prompt, *answer[:-1]])[len(prompt) - 1 :]
        tokens = torch.tensor(answer, device=hidden.device)
        for part, chosen in zip(hidden.split(LOGIT_ROWS), tokens.split(LOGIT_ROWS), strict=True):
            logits = self._logits(part)
            own = logits.gather(1, chosen[:, None])[:, 0]
            below += (logits.amax(-1) - own).tolist()
            scale += logits.abs().amax(-1).tolist()
            logprobs += (own - logits.logsumexp(-1)).tolist()
        return Places(below, scale, logprobs)

    def next_logits(self, text: Sequence[int]) -> torch.Tensor:
        """Logits float32 [V] on the host of the token after a text."""
        return self._logits(self._hidden(text)[-1:])[0].cpu()

    @torch.inference_mode()
    def _hidden(self, text: Sequence[int]) -> torch.Tensor:
        tokens = torch.tensor(text, device=self._model.device)
        context = UncachedContext(self._model, 1, len(text))
        with use_fp8_activations(self._fp8):
            return self._model.forward(tokens, torch.arange(len(text), device=tokens.device), context).last

    @torch.inference_mode()
    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden).float()


def _open(config: EngineConfig, device: torch.device) -> weights.Checkpoint:
    return weights.open_checkpoint(
        config.model,
        config.load_format,
        seed=config.seed,
        tokenizer=config.tokenizer,
        log=lambda line: None,
        device=str(device),
        max_model_len=config.max_model_len,
    )
