"""Mamba2: reference and kernels match a token-by-token recurrence in float64 and transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from crossed import first_quick, slow_but

from specbatch.kernels.attention.ragged_batch import RaggedBatch, StaticRaggedBatch
from specbatch.kernels.gemm.linear import Norm
from specbatch.kernels.recurrent import mamba2
from specbatch.kernels.recurrent.inputs import SsdHeads, SsdInputs, SsdMemory
from specbatch.kernels.recurrent.state_replay import StateReplay
from specbatch.kernels.sampling.tree_verify import ancestor_words

TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
SIZES = [(4, 16, 2, 16), (3, 24, 3, 32), (2, 5, 1, 12), (1, 80, 1, 20)]  # heads, their dim, groups, state
NEMOTRON = (4, 80, 2, 128)  # sizes of Nemotron-Nano-9B-v2 but for the numbers of heads and groups
CASES = [(size, torch.float32) for size in SIZES]
CASES += [(size, dtype) for size in (NEMOTRON, SIZES[0]) for dtype in TOLERANCE if dtype.itemsize == 2]
SLOTS, MOST = 6, 9


class Twin(NamedTuple):
    prefill: Callable[..., torch.Tensor]
    verify: Callable[..., torch.Tensor]


TWINS = ("reference", "triton", "deterministic")
CHUNKED = slow_but(TWINS[:2], TWINS)  # the third one computes token after token, which takes long on a CPU


@pytest.fixture(params=TWINS)
def twin(request: pytest.FixtureRequest) -> Twin:
    if request.param == "reference":
        return Twin(mamba2.ssd_prefill_ref, mamba2.ssd_verify_ref)
    from specbatch.kernels.recurrent import mamba2_triton, row_by_row_triton

    if request.param == "deterministic":
        return Twin(row_by_row_triton.ssd_prefill, row_by_row_triton.ssd_verify)
    return Twin(mamba2_triton.ssd_prefill, mamba2_triton.ssd_verify)


class Layer:
    """A layer with random weights, slots and pending rows full of NaN, and what each slot's sequence should hold."""

    def __init__(
        self, device: torch.device, sizes: tuple[int, int, int, int] = SIZES[0], dtype: torch.dtype = torch.float32,
        held: torch.dtype = torch.float32, most: int = MOST,
    ) -> None:  # fmt: skip
        if dtype == torch.bfloat16 and device.type != "cuda":
            pytest.skip("bfloat16 needs a CUDA device")
        count, dim, groups, state = sizes
        self.generator = torch.Generator().manual_seed(sum(sizes))
        self.device, self.dtype = device, dtype
        self.slack = max(TOLERANCE[dtype], TOLERANCE[held] if held != torch.float32 else 0)
        a_log, d, bias = (torch.rand(count, generator=self.generator).to(device) for _ in range(3))
        weight = (torch.rand(count * dim, generator=self.generator) + 0.5).to(device, dtype)
        # With such a large eps the norm depends on the scale of its input.
        self.heads = SsdHeads(count, dim, groups, state, 3 * a_log - 2.5, d + 0.5, 2 * bias - 2, Norm(weight, 0.3))
        columns = sum(self.heads.columns)
        self.widths = [count * dim, columns, count]
        states = torch.full((2, SLOTS, count, dim, state), torch.nan, dtype=held, device=device)
        width = sum(self.heads.columns[:2]) + count
        pending = torch.full((2, SLOTS, most, width), torch.nan, dtype=dtype, device=device)
        states[:, 0], pending[:, 0] = 1, 1  # padding may be anything finite
        self.memory = SsdMemory(states[1], pending[1])
        self.truth = torch.zeros(SLOTS, count, dim, state, dtype=torch.float64)
        self.folded = self.truth.clone()  # the same before the last verify: the content of a slot
        self.count = torch.zeros(SLOTS, dtype=torch.int64, device=device)

    def inputs(self, tokens: int) -> list[torch.Tensor]:
        """z, xbc and dt: columns of one projection."""
        rows = torch.randn(tokens, sum(self.widths), generator=self.generator).to(self.device, self.dtype)
        return list(rows.split(self.widths, 1))

    def token(self, h: torch.Tensor, inputs: list[torch.Tensor], at: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The state after row `at`, and its output."""
        heads = self.heads
        z, xbc, dt = (part[at].cpu().double() for part in inputs)
        x, b, c = xbc.split(heads.columns)
        x = x.view(heads.count, heads.dim)
        b, c = (side.view(heads.groups, -1).repeat_interleave(heads.count // heads.groups, 0) for side in (b, c))
        step = F.softplus(dt + heads.dt_bias.cpu().double())
        fade = torch.exp(-step * heads.a_log.cpu().double().exp())
        h = fade[:, None, None] * h + torch.einsum("h,hp,hn->hpn", step, x, b)
        y = torch.einsum("hpn,hn->hp", h, c) + heads.d.cpu().double()[:, None] * x
        u = (y.flatten() * F.silu(z)).view(heads.groups, -1)
        u = u / (u.square().mean(1, keepdim=True) + heads.norm.eps).sqrt()
        return h, u.flatten() * heads.norm.weight.cpu().double()

    def prefill(self, run: Callable[..., torch.Tensor], spans: list[tuple[int, int, int]], recorded: int = 0) -> None:
        """Runs (slot, start, end) chunks in one pass; `recorded`: fixed addresses with room for that many."""
        slots, starts, ends = (list(part) for part in zip(*spans, strict=True))
        table = torch.zeros(SLOTS, 1, dtype=torch.int64, device=self.device)
        given = RaggedBatch(starts, ends, slots, table, 1)
        inputs = self.inputs(given.offsets[-1])
        wanted = []
        for slot, first, stop in zip(slots, given.offsets, given.offsets[1:], strict=False):
            h = self.truth[slot] if starts[slots.index(slot)] else torch.zeros_like(self.truth[slot])
            for at in range(first, stop):
                h, y = self.token(h, inputs, at)
                wanted.append(y)
            self.truth[slot] = h
            self.count[slot] = 0
        if recorded:
            fixed = StaticRaggedBatch(len(wanted), recorded, table, 1, fresh=given.fresh)
            fixed.load(given)
            given = fixed
        z, xbc, dt = inputs
        out = torch.full_like(z, torch.nan).contiguous()
        y = run(SsdInputs(xbc, dt, z, self.heads, self.memory), given, out)
        assert y.data_ptr() == out.data_ptr()
        self.close(y, torch.stack(wanted))
        self.close(self.memory.state[slots], self.truth[slots])

    def verify(self, run: Callable[..., torch.Tensor], slots: list[int], rows: int, kept: torch.Tensor | None) -> None:
        """A verify of random rows, a tree if `kept` [R, M] is given, of which a random path is accepted."""
        z, xbc, dt = inputs = self.inputs(len(slots) * rows)
        on = torch.tensor(slots, device=self.device)
        words = None
        parents = torch.arange(rows - 1).expand(len(slots), -1)
        if kept is not None:
            parents = torch.stack([
                torch.stack([torch.randint(0, node + 1, (), generator=self.generator) for node in range(rows - 1)])
                for _ in slots
            ]) if rows > 1 else parents  # fmt: skip
            words = ancestor_words(parents, rows).to(self.device)
        wanted = []
        states = []
        for place, slot in enumerate(slots):
            node_states: list[torch.Tensor] = []
            for node in range(rows):
                before = self.truth[slot] if node == 0 else node_states[int(parents[place, node - 1])]
                h, y = self.token(before, inputs, place * rows + node)
                node_states.append(h)
                wanted.append(y)
            states.append(node_states)
        y = run(SsdInputs(xbc, dt, z, self.heads, self.memory), StateReplay(on, self.count, kept, words))
        live = [place for place, slot in enumerate(slots) if slot]
        self.close(y.unflatten(0, (-1, rows))[live], torch.stack(wanted).unflatten(0, (-1, rows))[live])
        self.close(self.memory.state[on[live]], self.truth[[slots[place] for place in live]])
        for part in (y, self.memory.state[0], self.memory.pending[0]):
            assert part.isfinite().all()

        for place in live:
            slot, path = slots[place], [int(torch.randint(rows, (), generator=self.generator))]
            while path[0]:
                path.insert(0, int(parents[place, path[0] - 1]))
            self.folded[slot], self.truth[slot] = self.truth[slot], states[place][path[-1]]
            self.count[slot] = len(path)
            if kept is not None:
                kept[slot] = torch.randint(-9, 9999, (MOST,), generator=self.generator)
                kept[slot, : len(path)] = torch.tensor(path)
            rejected = [node for node in range(self.memory.pending.shape[1]) if node not in path]
            self.memory.pending[slot, rejected] = torch.nan

    def close(self, ours: torch.Tensor, truth: torch.Tensor) -> None:
        torch.testing.assert_close(ours.cpu().double(), truth, rtol=self.slack, atol=self.slack)


@pytest.mark.parametrize(("sizes", "dtype"), first_quick(1, CASES))
def test_prompts_and_chains(
    device: torch.device, twin: Twin, sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    layer = Layer(device, sizes, dtype)
    layer.prefill(twin.prefill, [(4, 0, 37), (2, 0, 1)])
    layer.prefill(twin.prefill, [(4, 37, 38), (2, 1, 8)])
    for rows in (4, 1, MOST):
        layer.verify(twin.verify, [2, 4], rows, None)
    layer.prefill(twin.prefill, [(2, 0, 5)])  # another sequence's
    layer.verify(twin.verify, [4, 2], 2, None)
    layer.verify(twin.verify, [2], 2, None)


@pytest.mark.parametrize(
    ("sizes", "dtype", "most"),
    first_quick(1, [(SIZES[1], torch.float32, 4), (SIZES[2], torch.float32, 1), (*CASES[-1], 4)]),
)
@pytest.mark.parametrize("twin", CHUNKED, indirect=True)
def test_short_chains(
    device: torch.device, twin: Twin, sizes: tuple[int, int, int, int], dtype: torch.dtype, most: int
) -> None:
    """Of as many rows as are held at most, and of fewer."""
    layer = Layer(device, sizes, dtype, most=most)
    layer.prefill(twin.prefill, [(4, 0, 9), (2, 0, 1)])
    for rows in dict.fromkeys((most, 1, max(1, most - 1))):
        layer.verify(twin.verify, [2, 0, 4], rows, None)


@pytest.mark.parametrize(("sizes", "dtype"), slow_but(CASES[1:2], CASES))
def test_trees(device: torch.device, twin: Twin, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    layer = Layer(device, sizes, dtype)
    kept = torch.full((SLOTS, MOST), 77, dtype=torch.int64, device=device)
    layer.prefill(twin.prefill, [(5, 0, 2), (3, 0, 7)])
    for rows in (MOST, 5):
        layer.verify(twin.verify, [5, 3], rows, kept)


@pytest.mark.parametrize("twin", CHUNKED, indirect=True)
def test_prompt_split_at_uneven_chunk_boundaries(device: torch.device, twin: Twin) -> None:
    layer = Layer(device)
    layer.prefill(twin.prefill, [(3, 0, 67)])
    layer.prefill(twin.prefill, [(1, 0, 5), (3, 67, 134)])
    layer.prefill(twin.prefill, [(3, 134, 135), (1, 5, 40)])


@pytest.mark.parametrize("twin", CHUNKED, indirect=True)
@pytest.mark.parametrize("sizes", [(2, 80, 2, 20), pytest.param((4, 128, 2, 16), marks=pytest.mark.slow)])
def test_several_chunks_of_16_bits(device: torch.device, twin: Twin, sizes: tuple[int, int, int, int]) -> None:
    """Prompts that end within a chunk; the second tile of a head of 80 has 16 rows."""
    layer = Layer(device, sizes, torch.float16)
    layer.prefill(twin.prefill, [(3, 0, 65), (1, 0, 3), (2, 0, 128)])
    layer.prefill(twin.prefill, [(1, 3, 70), (3, 65, 195)])


@pytest.mark.parametrize("twin", CHUNKED, indirect=True)
def test_a_token_does_not_depend_on_later_ones(device: torch.device, twin: Twin) -> None:
    """C of the first token times B of a later one, which the mask hides, is above the largest number of float16."""
    layer = Layer(device, (2, 64, 1, 128), torch.float16)
    layer.slack = 2e-2  # the states are some 40 times as large as elsewhere
    plain = layer.inputs

    def large(tokens: int) -> list[torch.Tensor]:
        z, xbc, dt = plain(tokens)
        _, b, c = xbc.split(layer.heads.columns, 1)
        b[40:], c[0] = 40, 40
        c[40:] /= 128
        return [z, xbc, dt]

    layer.inputs = large  # type: ignore[method-assign]
    layer.prefill(twin.prefill, [(1, 0, 60)])


@pytest.mark.parametrize("held", [torch.float16, torch.bfloat16])
def test_half_precision_states(
    device: torch.device, twin: Twin, held: torch.dtype, request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.params["twin"] == "deterministic" and held == torch.bfloat16 and device.type != "cuda":
        pytest.skip("the interpreter truncates to bfloat16, here after every token")
    layer = Layer(device, held=held)
    layer.prefill(twin.prefill, [(2, 0, 5), (1, 0, 40)])
    for rows in (3, 2, 4):
        layer.verify(twin.verify, [1, 2], rows, None)
    assert layer.memory.state.dtype == held


def test_padding_rows_share_row_0(device: torch.device, twin: Twin) -> None:
    layer = Layer(device)
    layer.count[0] = 2
    kept = torch.zeros(SLOTS, MOST, dtype=torch.int64, device=device)
    layer.prefill(twin.prefill, [(2, 0, 5), (1, 0, 4)])
    for _ in range(2):
        layer.verify(twin.verify, [1, 0, 2, 0], 3, kept)


def test_ragged_batch_at_fixed_addresses(device: torch.device) -> None:
    """Unused entries of a ragged batch write nothing, not even to row 0."""
    from specbatch.kernels.recurrent import mamba2_triton

    layer = Layer(device)
    layer.prefill(mamba2_triton.ssd_prefill, [(2, 0, 5), (1, 0, 40)], recorded=4)
    assert (layer.memory.state[0] == 1).all()
    assert layer.memory.state[3:].isnan().all()


def test_small_decays_keep_precision(device: torch.device, twin: Twin) -> None:
    """A state that hardly fades: softplus of very negative numbers."""
    layer = Layer(device)
    layer.heads.dt_bias.fill_(-14)
    layer.prefill(twin.prefill, [(2, 0, 9)])
    h, truth = layer.memory.state[2].cpu().double(), layer.truth[2]
    assert (h - truth).abs().max() < 1e-5 * truth.abs().max()


def test_verify_does_not_round_states(device: torch.device, twin: Twin) -> None:
    """However few digits the inputs have: a state lives for thousands of verifies."""
    layer = Layer(device, dtype=torch.float16)
    layer.memory.state.zero_()
    for _ in range(3):
        layer.verify(twin.verify, [1], 5, None)
    torch.testing.assert_close(layer.memory.state[1].cpu().double(), layer.folded[1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("groups", [1, 2])
def test_matches_transformers(groups: int) -> None:
    """The mixer of Nemotron-H; steps stay above its clamp, and there is one chunk: transformers before
    5.15 computes other values with more."""
    modeling = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
    config = modeling.NemotronHConfig(
        hidden_size=32, mamba_num_heads=6, mamba_head_dim=8, n_groups=groups, ssm_state_size=16, conv_kernel=4,
        chunk_size=32, layers_block_type=["mamba", "mlp"],
    )  # fmt: skip
    torch.manual_seed(groups)
    mixer = modeling.NemotronHMamba2Mixer(config, layer_idx=0).float().eval()
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if name in ("A_log", "D", "norm.weight", "conv1d.bias"):
                parameter.uniform_(0.2, 1.5)
            elif name == "dt_bias":
                parameter.uniform_(0.3, 0.8)
        hidden = torch.randn(1, 21, 32)
        wanted = mixer(hidden)
        z, xbc, dt = mixer.in_proj(hidden[0]).split([48, mixer.conv_dim, 6], 1)
        padded = F.pad(xbc, (0, 0, 3, 0)).t()[None]
        convolved = F.conv1d(padded, mixer.conv1d.weight, mixer.conv1d.bias, groups=mixer.conv_dim)
        heads = SsdHeads(
            6, 8, groups, 16, mixer.A_log, mixer.D, mixer.dt_bias, Norm(mixer.norm.weight, config.layer_norm_epsilon)
        )
        memory = SsdMemory(torch.full((2, 6, 8, 16), torch.nan), torch.zeros(2, 4, sum(heads.columns[:2]) + 6))
        spans = RaggedBatch([0], [21], [1], torch.zeros(2, 1, dtype=torch.int64), 1)
        inputs = SsdInputs(F.silu(convolved[0].t()), dt, z, heads, memory)
        ours = mixer.out_proj(mamba2.ssd_prefill(inputs, spans))
    torch.testing.assert_close(ours[None], wanted, rtol=1e-5, atol=1e-5)
