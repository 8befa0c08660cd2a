"""Peak activation memory of a pass matches the plan; kernels are replaced by stubs that only allocate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from crossed import crossed
from peak_memory import as_on_a_device, peak_of
from targets import GPT_OSS, HYBRIDS, LATENT, MTP, SIZES, WINDOWED, Targets
from watched_calls import Watch

from specbatch.core.attention_metadata import PrefillMetadata, PromptChunk
from specbatch.drafters.base import DraftPlan, NoDraft
from specbatch.engine.setup import memory_plan
from specbatch.engine.setup.memory_plan import _token_bytes
from specbatch.kernels.attention.prefill.prefill_backends import TritonPrefill
from specbatch.kernels.collectives.communicator import DeviceCommunicator
from specbatch.memory.kv_cache import KVCache
from specbatch.memory.recurrent_state import RecurrentStates, state_types
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder, token_bytes
from specbatch.models.weight_shapes import tensor_shapes
from specbatch.weights.shapes import SHAPES

CPU = torch.device("cpu")
TOKENS = 512
LARGE = {"intermediate_size": 400, "hidden_size": 96, "moe_intermediate_size": 72}  # MLPs dominate
LARGE |= {"num_experts": 16, "n_routed_experts": 16, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 100}
FAMILIES: dict[str, dict[str, Any]] = {
    **HYBRIDS, **LATENT, "llama": {"architectures": ["LlamaForCausalLM"]}, "gpt-oss": GPT_OSS,
    "gemma4": WINDOWED["gemma4"],
    "gemma4-moe": WINDOWED["gemma4-moe"],
    "gemma4-e2b": WINDOWED["gemma4-e2b"],
}  # fmt: skip


class NoKernel:
    """In place of kernels that exchange tensors."""

    most = 1 << 25

    def all_reduce(self, *_: torch.Tensor | None) -> None:
        pass

    all_gather = all_reduce


def rank_of(size: int) -> DeviceCommunicator:
    found: Any = object.__new__(DeviceCommunicator)
    found.rank, found.size, found.most_one_shot = 0, size, 0
    found.one_shot = found.two_shot = NoKernel()
    return cast(DeviceCommunicator, found)


HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("family", "sizes", "dtype", "ranks"),
    crossed(FAMILIES, [({}, FULL, 1), (LARGE, HALF, 1), (LARGE, FULL, 2), ({}, HALF, 1), ({}, HALF, 2)]),
)
def test_prefill_activations_match_the_plan(
    family: str, sizes: dict[str, Any], dtype: torch.dtype, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_device(monkeypatch)
    known = SIZES | FAMILIES[family]
    sizes = sizes | {"num_local_experts": 16}
    whole = ModelConfig.from_dict(known | {key: value for key, value in sizes.items() if key in known})
    config, shapes = whole.divided(ranks), tensor_shapes(whole)
    divided = rank_of(ranks) if ranks > 1 else None
    how: dict[str, Any] = {"dtype": dtype, "device": CPU, "max_positions": TOKENS, "ranks": divided}
    model = Decoder(config, lambda name: torch.zeros(shapes[name]), **how)
    states = RecurrentStates(config.state_shapes, max(model.recurrent_layers, 1), 2, 1, state_types(dtype, "fp32"), CPU)
    cache = KVCache(config, model.kv_layers, TOKENS // 4 + 2, 4, dtype, CPU, TritonPrefill(), states)
    metadata = PrefillMetadata(torch.zeros(2, TOKENS // 4, dtype=torch.int64), [PromptChunk(1, 0, TOKENS)], 4)
    tokens = torch.zeros(TOKENS, dtype=torch.int64)
    inputs = tokens, metadata.positions, metadata.bind(cache), metadata.last
    taken = peak_of(lambda: model.forward(*inputs))
    # On tiny sizes, what a sum over ranks needs besides is a larger share.
    assert taken <= TOKENS * token_bytes(config, dtype) <= (1.25 if ranks == 1 else 1.3) * taken


@pytest.mark.parametrize(
    "algorithm",
    [
        "none",
        "eagle",
        "eagle3",
        "mtp",
        "dflash",
        "dflash2",
        "dspark",
        "domino",
        "lilicorr",
        "xpress",
        "model-tree",
        "mtp-layers",
    ],
)
@pytest.mark.parametrize("name", ["qwen3-next", pytest.param("lfm2", marks=pytest.mark.slow)])
def test_drafter_activations_match_the_plan(
    targets: Targets,
    name: str,
    algorithm: str,
    monkeypatch: pytest.MonkeyPatch,
    watch: Watch,
    use_prefill: Callable[[object], None],
) -> None:
    """A full prefill pass, including the features for the drafter and the drafter's own KV."""
    if algorithm.startswith("mtp") and name not in MTP:
        return
    as_on_a_device(monkeypatch)
    use_prefill(TritonPrefill())
    planned = watch(memory_plan, "plan_memory", before=lambda *_, token_bytes, **__: token_bytes)
    engine = targets.engine(name, algorithm, max_running=1, max_model_len=400, prefill_chunk=256)
    worker = engine.parts.worker
    taken = peak_of(lambda: worker.prefill_step.warm_up(256))
    assert taken <= 256 * planned[0] <= 1.25 * taken


def test_only_a_head_keeps_embedded_tokens() -> None:
    config = ModelConfig.from_dict(SHAPES["toy"])
    plan = DraftPlan(lambda model, loader: NoDraft(), config, kv_layers=1)
    assert _token_bytes(config, plan, FULL) == token_bytes(config, FULL)
    assert _token_bytes(config, replace(plan, embedded=2), FULL) == token_bytes(config, FULL) + 2 * (64 * 4 + 16)


def test_activation_bytes_of_qwen3_5_moe() -> None:
    """8 experts and the shared one, on 2048 columns; gated delta nets of 16 and 32 heads of 128, chunks of 64."""
    config = ModelConfig.from_dict(SHAPES["qwen3.5-35b-a3b"])
    projected, mixed = 8192 + 4096 + 2 * 32, 4096
    pairs = 9 * (512 + 2048)
    mixture = 2 * (2 * 2048 + pairs) + 7 * 256 + 12 * 9
    assert mixture > 2 * 8192 + 32 * (2 * 64 * 2 + 4)  # convolved columns, chunks
    assert token_bytes(config, torch.bfloat16) == 2 * (2048 + projected + mixed) + mixture + 48
