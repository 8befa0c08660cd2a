"""Models divided over ranks: parts of weights, and features that equal those of the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from crossed import slow_but
from hard_logits import DIVIDED, hard_logits, part_of_logits
from safetensors.torch import save_file
from stand_ins import quantized_by_activations
from targets import SIZES, TARGETS, Targets
from thread_ranks import ThreadCommunicator, on_ranks, thread_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from uncached import decoder_of, logits_of
from watched_calls import Watch

from specbatch import SamplingParams
from specbatch.kernels.collectives.communicator import Communicator
from specbatch.kernels.gemm.linear import Norm
from specbatch.kernels.gemm.quantized.fp8_activations import use_fp8_activations
from specbatch.kernels.gemm.quantized.fp8_linear import FP8Linear, FP8Weight
from specbatch.kernels.sampling.argmax_topk import Maxima, argmax
from specbatch.models.decoder import Decoder
from specbatch.models.partition import RowParallelLinear, part_of, scores
from specbatch.models.weight_reader import Reader
from specbatch.models.weight_shapes import parameter_count
from specbatch.weights import open_checkpoint

CPU = torch.device("cpu")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_parts_of_all_ranks_are_the_tensor(ranks: int) -> None:
    whole = torch.arange(48 * 5).view(48, 5)
    parts = [part_of(whole, (48 // ranks, 5), rank, ranks) for rank in range(ranks)] if 48 % ranks == 0 else []
    assert torch.equal(torch.cat(parts), whole)


def test_sections_are_divided_separately() -> None:
    q, k, v = torch.arange(4), torch.arange(10, 12), torch.arange(20, 22)
    whole = torch.cat([q, k, v])
    assert part_of(whole, (4,), 1, 2, (2, 1, 1)).tolist() == [2, 3, 11, 21]


def test_fewer_parts_than_ranks_are_replicated() -> None:
    whole = torch.arange(6)
    assert [part_of(whole, (3,), rank, 4).tolist() for rank in range(4)] == [[0, 1, 2]] * 2 + [[3, 4, 5]] * 2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_divided_output_matrix_gives_the_logits_of_all_tokens(ranks: int, tied: bool) -> None:
    whole, hidden = torch.randn(17, 6), torch.randn(3, 6)  # of 8 ranks, two have no token
    config: Any = SimpleNamespace(hidden_size=6, format_except_ends=None)

    def logits(communicator: ThreadCommunicator) -> torch.Tensor:
        reader = Reader(config, lambda name: whole, torch.float32, CPU, ranks=communicator)
        return reader.output_matrix("lm_head.weight", 17, whole if tied else None)(hidden)

    for found in on_ranks(ranks, logits):
        torch.testing.assert_close(found, hidden @ whole.T)


@pytest.mark.parametrize(("ranks", "vocabulary"), DIVIDED)
def test_argmax_of_a_divided_output_matrix_is_that_of_all_logits(ranks: int, vocabulary: int) -> None:
    logits, config = hard_logits(vocabulary), SimpleNamespace(hidden_size=9, format_except_ends=None)

    def best(communicator: ThreadCommunicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        reader = Reader(config, lambda name: logits.T.contiguous(), torch.float32, CPU, ranks=communicator)  # type: ignore[arg-type]
        head: Any = reader.output_matrix("lm_head.weight", vocabulary)
        # A product with the identity would not do: 0 * inf is not a number.
        head._part = lambda x, **_: part_of_logits(logits, communicator.rank, ranks).contiguous()
        found = scores(head, torch.eye(9), greedy=True)
        assert isinstance(found, Maxima)
        return *found.best(), argmax(found)

    for values, tokens, others in on_ranks(ranks, best):
        assert torch.equal(tokens, logits.argmax(1))
        assert torch.equal(others, tokens)
        torch.testing.assert_close(values, logits.gather(1, tokens[:, None])[:, 0], equal_nan=True)


def test_greedy_steps_exchange_no_logits(targets: Targets, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    thread_group(monkeypatch)
    engine = targets.engine("llama", "eagle3", tensor_parallel=2)
    gathered = watch(ThreadCommunicator, "all_gather", before=lambda communicator, x: tuple(x.shape))
    for temperature in (0.0, 1.0):
        gathered.clear()
        engine.generate([[3, 4]], SamplingParams(max_new_tokens=3, ignore_eos=True, temperature=temperature))
        assert (sum(shape[1] == 19 for shape in gathered) > 2) == (temperature > 0)  # half of 37; those of the prompt


class Reads(TorchDispatchMode):
    """Counts the bytes that are converted of a file's tensors, which are views of the mapped file."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        starts = [item.data_ptr() for item in tensors]
        self._file = range(min(starts), max(starts) + max(item.nbytes for item in tensors))
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        if not self._holds(found):  # no view
            self.bytes += sum(item.nbytes for item in tree_leaves(args) if self._holds(item))
        return found

    def _holds(self, item: Any) -> bool:
        return isinstance(item, torch.Tensor) and item.layout == torch.strided and item.data_ptr() in self._file


@pytest.mark.parametrize("name", slow_but([*TARGETS][::2], TARGETS))
def test_each_rank_reads_its_part_of_the_file_only(
    targets: Targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES | TARGETS[name]))
    tensors = {tensor: values.bfloat16() for tensor, values in targets.checkpoint(name).tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    mapped = {tensor: checkpoint.tensor(tensor) for tensor in checkpoint.names()}
    monkeypatch.setattr("specbatch.models.decoder.ThreadPoolExecutor", SerialExecutor)

    def bytes_read(rank: int, size: int) -> int:
        config = checkpoint.config.divided(size)
        communicator: Any = SimpleNamespace(rank=rank, size=size)  # loading exchanges nothing
        with Reads(list(mapped.values())) as reads:
            Decoder(config, mapped.__getitem__, dtype=torch.float64, device=CPU, max_positions=8, ranks=communicator)
        return reads.bytes

    parts = checkpoint.config.divided(2)
    unread = (0, parts.hidden_size)  # the last row of 2 * 19, for 37 tokens
    assert [bytes_read(rank, 2) for rank in range(2)] == [2 * (parameter_count(parts) - count) for count in unread]
    assert bytes_read(0, 1) == 2 * parameter_count(checkpoint.config)


class SerialExecutor:
    """In place of threads, whose dispatch modes are their own."""

    def __init__(self, max_workers: int) -> None:
        pass

    def __enter__(self) -> SerialExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    map = staticmethod(map)


@pytest.mark.parametrize("name", TARGETS)
def test_divided_model_computes_the_logits_of_the_whole_one(targets: Targets, name: str) -> None:
    checkpoint, tokens = targets.checkpoint(name), torch.arange(3, 23) % 37

    def logits(ranks: ThreadCommunicator | None) -> torch.Tensor:
        return logits_of(decoder_of(checkpoint, ranks=ranks), tokens)

    whole = logits(None)
    first, second = on_ranks(2, logits)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, whole, atol=2e-4, rtol=1e-4)


def test_a_divided_fp8_layer_quantizes_what_the_gate_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on one rank: fused with the activation."""
    seen = quantized_by_activations(monkeypatch)
    weights = (
        FP8Weight(torch.randn(shape).to(torch.float8_e4m3fn), torch.rand(1, 1)) for shape in ((64, 32), (32, 32))
    )
    gate_up, part = (FP8Linear(weight) for weight in weights)
    ranks = SimpleNamespace(all_reduce=lambda part, residual: part + residual)
    down = RowParallelLinear(part, cast(Communicator, ranks))
    x, norm = torch.randn(3, 32).half(), Norm(torch.ones(32).half(), 1e-5)
    with use_fp8_activations(True):
        found = down.after_gate(gate_up, x, norm, residual=x)
        assert seen == [torch.float16]
        assert torch.equal(found, part.after_gate(gate_up, x, norm, residual=None) + x)
