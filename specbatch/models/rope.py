"""Rotary position embedding (RoPE): its parameters in a config.json, and its frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbatch.errors import refuse
from specbatch.files.config_values import count_of, flag_of, positive_of, positives_of, table_of

if TYPE_CHECKING:
    import torch

DEFAULT_THETA = 10000.0  # of the dense families, if a config has no theta
# Keys that each rope type reads. Other keys are refused, not ignored silently.
_ROPE_COMMON = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "finetuned"}
_ROPE_KEYS = {
    "default": {"factor", "original_max_position_embeddings"},
    "linear": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
    "divisors": {"divisors"},  # our own type, written when a GGUF file is converted
}


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: which channels rotate, and at which frequencies.

    kind              "default", "linear", "llama3", "yarn" or "divisors" (one per frequency, as in GGUF)
    rotary_dim        leading channels of a head that rotate, paired as halves (channel i with i + rotary_dim/2)
    attention_factor  factor on cos and sin
    source            where theta was read: "rope_parameters", "rope_scaling", "rope_theta", "class default"
                      or "gguf"
    The other fields are parameters of the scaling, for the kinds that have them.
    """

    theta: float
    rotary_dim: int
    kind: str = "default"
    attention_factor: float = 1.0
    source: str = "class default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    divisors: tuple[float, ...] = ()

    def __str__(self) -> str:
        if not self.rotary_dim:
            return "no rope"
        scaling = "" if self.kind == "default" else f", scaled by {self.kind}"
        return f"rope theta {self.theta:g} (from {self.source}{scaling})"

    def inverse_frequencies(self) -> torch.Tensor:
        """Angle per position of each pair of channels: float32, [rotary_dim / 2]."""
        import torch

        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.int64).float() / self.rotary_dim
        periods: torch.Tensor = self.theta**exponents
        if self.kind == "default":
            return 1.0 / periods
        if self.kind == "linear":
            return 1.0 / periods / self.factor
        if self.kind == "divisors":
            return 1.0 / periods / torch.tensor(self.divisors, dtype=torch.float32)
        assert self.original_max_position is not None
        if self.kind == "llama3":
            return self._llama3(1.0 / periods, self.original_max_position)
        assert self.kind == "yarn"
        return self._yarn(periods, self.original_max_position)

    def _llama3(self, plain: torch.Tensor, original: int) -> torch.Tensor:
        """High frequencies stay, low ones are divided by the factor, those between are interpolated."""
        import torch

        waves = 2 * math.pi / plain
        slow = torch.where(waves > original / self.low_freq_factor, plain / self.factor, plain)
        keep = (original / waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = (1 - keep) * plain / self.factor + keep * plain
        between = (waves >= original / self.high_freq_factor) & (waves <= original / self.low_freq_factor)
        return torch.where(between, blend, slow)

    def _yarn(self, periods: torch.Tensor, original: int) -> torch.Tensor:
        """High frequencies stay, low ones are divided by the factor, with a linear ramp between."""
        import torch

        def channel(turns: float) -> float:
            return self.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        if low == high:
            high += 0.001  # avoids a division by zero
        ramp = (torch.arange(self.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)
        keep = 1 - ramp.clamp(0, 1)
        return 1.0 / (self.factor * periods) * (1 - keep) + 1.0 / periods * keep


def read_rope(config: dict[str, Any], head_dim: int, max_position: int) -> Rope:
    """Read the RoPE parameters of a config.json. max_position: the original length of a scaling that does not state
    it."""
    source = "rope_scaling" if table_of(config, "rope_scaling") else "rope_parameters"
    found = table_of(config, source)
    if found and all(isinstance(value, dict) for value in found.values()):
        if "full_attention" not in found:
            raise refuse(source, sorted(found), "of tables per layer type only 'full_attention' is supported")
        found = found["full_attention"]
    values = {key: value for key, value in found.items() if value is not None}

    kind = values.get("rope_type", values.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise refuse(f"{source}.rope_type", kind, f"supported are {', '.join(_ROPE_KEYS)}")
    for key in values:
        if key not in _ROPE_COMMON | _ROPE_KEYS[kind]:
            raise refuse(f"{source}.{key}", values[key], f"rope type {kind!r} has no such value")
    if "rope_theta" in values:
        theta = positive_of(values, "rope_theta", where=source)
    elif config.get("rope_theta") is not None:
        theta, source = positive_of(config, "rope_theta"), "rope_theta"
    else:
        theta, source = DEFAULT_THETA, "class default"
    partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise refuse("partial_rotary_factor", partial, "these families rotate whole heads; it must be 1")
    if kind == "default":
        return Rope(theta=theta, rotary_dim=head_dim, source=source)
    if kind == "divisors":
        divisors = tuple(positives_of(values, "divisors") or ())
        if len(divisors) != head_dim // 2:
            raise refuse("rope.divisors", divisors, f"give {head_dim // 2} positive numbers")
        return Rope(theta=theta, rotary_dim=head_dim, kind=kind, source=source, divisors=divisors)

    factor = positive_of(values, "factor", where="rope")
    key = "original_max_position_embeddings"
    rope: dict[str, Any] = {"theta": theta, "rotary_dim": head_dim, "kind": kind, "source": source, "factor": factor}
    if kind == "linear":
        return Rope(**rope)
    rope["original_max_position"] = count_of(config, key, count_of(values, key, max_position))
    if kind == "llama3":
        low = positive_of(values, "low_freq_factor", where="rope")
        high = positive_of(values, "high_freq_factor", where="rope")
        if low >= high:
            raise refuse("rope.low_freq_factor", low, f"it must be below high_freq_factor={high}")
        return Rope(**rope, low_freq_factor=low, high_freq_factor=high)
    if theta <= 1:
        raise refuse("rope_theta", theta, "yarn needs a theta above 1")
    return Rope(
        **rope,
        attention_factor=_yarn_attention_factor(values, factor),
        beta_fast=positive_of(values, "beta_fast", 32.0, where="rope"),
        beta_slow=positive_of(values, "beta_slow", 1.0, where="rope"),
        truncate=flag_of(values, "truncate", True),
    )


def _yarn_attention_factor(values: dict[str, Any], factor: float) -> float:
    if "attention_factor" in values:
        return positive_of(values, "attention_factor", where="rope")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = [key for key in ("mscale", "mscale_all_dim") if values.get(key) not in (None, 0)]
    if len(given) < 2:
        return mscale(1.0)
    one, every = (mscale(positive_of(values, key, where="rope")) for key in given)
    return one / every
