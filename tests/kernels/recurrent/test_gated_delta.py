"""Gated delta rule: matches a token-by-token recurrence in float64 and transformers."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from crossed import first_quick, slow_but
from trees import ancestor_masks, path_of, random_parents

from specbatch.kernels.attention.ragged_batch import RaggedBatch, StaticRaggedBatch
from specbatch.kernels.recurrent import gated_delta, gated_delta_prefill_triton, gated_delta_triton, row_by_row_triton
from specbatch.kernels.recurrent.inputs import DeltaHeads, DeltaInputs, Pending
from specbatch.kernels.recurrent.state_replay import StateReplay

TWINS = {
    "reference": (gated_delta.delta_prefill_ref, gated_delta.delta_verify_ref),
    "kernel": (gated_delta_prefill_triton.delta_prefill, gated_delta_triton.delta_verify),
    "deterministic": (row_by_row_triton.delta_prefill, row_by_row_triton.delta_verify),
}
SLACK = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ROWS = 7  # device rows


def tokens_of(inputs: DeltaInputs) -> list[tuple[torch.Tensor, ...]]:
    """qkv, z, b and a of each token in float64."""
    return list(zip(*(x.double().cpu() for x in inputs[:4]), strict=True))


class Case:
    """Sequences on scattered device rows; `states` holds each state after its accepted tokens, in float64."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, twin: str, sizes: tuple[int, int, int, int],
        held: int = 9, stored: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        if dtype == torch.bfloat16 and device.type != "cuda" and twin != "reference":
            pytest.skip("the interpreter has no bfloat16")
        torch.manual_seed(sum(sizes))
        self.random = random.Random(sum(sizes))
        self.device, self.dtype, self.slack = device, dtype, max(SLACK[dtype], SLACK[stored])
        self.prefill, self.verify = TWINS[twin]
        keys, values, key_dim, value_dim = sizes
        a_log, dt_bias = (torch.randn(values).to(device) for _ in range(2))
        norm = (torch.rand(value_dim) + 0.5).to(device, dtype)
        self.heads = DeltaHeads(keys, values, key_dim, value_dim, a_log - 1, dt_bias - 1, norm, 1e-5)
        shapes = (keys, key_dim), (values, value_dim), (values,)
        # Of two layers, adjacent for each device row.
        self.state = torch.full((ROWS, 2, values, key_dim, value_dim), torch.nan, device=device, dtype=stored)[:, 1]
        self.pending = Pending(*(torch.full((ROWS, 2, held, *at), torch.nan, device=device)[:, 1] for at in shapes))
        for item in (self.state, *self.pending):
            item[0] = torch.randn(item.shape[1:])  # the padding row: anything that is finite
        self.count = torch.zeros(ROWS, dtype=torch.int64)
        self.count[0] = 2
        self.kept = torch.randint(held, (ROWS, held))
        self.states: dict[int, torch.Tensor] = {}

    def inputs(self, count: int) -> DeltaInputs:
        """Of a number of tokens: strided columns of projections."""
        h = self.heads
        conv_columns = 2 * h.keys * h.key_dim + h.values * h.value_dim
        projection = torch.randn(count, conv_columns + h.values * h.value_dim + 3).to(self.device, self.dtype)
        gates = torch.randn(count, 2 * h.values + 1).to(self.device, self.dtype)
        # Similar keys, so that a row's u depends on many earlier rows.
        projection[:, h.keys * h.key_dim : 2 * h.keys * h.key_dim] += 1
        return DeltaInputs(
            projection[:, 1 : 1 + conv_columns],
            projection[:, 2 + conv_columns : -1],
            gates[:, : h.values] + 1,
            gates[:, -h.values :],
            h,
            self.state,
        )

    def step(self, state: torch.Tensor, token: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of the recurrence: the state after a token and the layer's output."""
        h = self.heads
        qkv, z, b, a = token
        q, k, v = qkv.split([h.keys * h.key_dim, h.keys * h.key_dim, h.values * h.value_dim])
        q, k = (x.view(h.keys, -1).repeat_interleave(h.values // h.keys, 0) for x in (q, k))
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        g = -h.a_log.double().cpu().exp() * F.softplus(a + h.dt_bias.double().cpu())
        state = g.exp()[:, None, None] * state
        u = b.sigmoid()[:, None] * (v.view(h.values, -1) - torch.einsum("hk,hkv->hv", k, state))
        state = state + k[:, :, None] * u[:, None]
        o = torch.einsum("hk,hkv->hv", q, state) * h.key_dim**-0.5
        o = o * (o.square().mean(-1, keepdim=True) + h.eps).rsqrt() * h.norm.double().cpu()
        return state, o.flatten() * F.silu(z)

    def check(self, y: torch.Tensor, expected: list[torch.Tensor]) -> None:
        torch.testing.assert_close(y.double().cpu(), torch.stack(expected), rtol=self.slack, atol=4 * self.slack)

    def prompt(self, spans: list[tuple[int, int, int]], recorded: bool = False) -> None:
        """(device row, start, end) of each."""
        rows, starts, ends = map(list, zip(*spans, strict=True))
        table = torch.zeros(ROWS, 1, dtype=torch.int64, device=self.device)
        layout = RaggedBatch(starts, ends, rows, table, 16)
        offsets = layout.offsets
        if recorded:
            graph = StaticRaggedBatch(offsets[-1] + 9, len(spans) + 2, table, 16, fresh=layout.fresh)
            for chunk in (16, 32, 64):
                graph.tiles(chunk)
            graph.load(layout)
            layout = graph
        inputs = self.inputs(offsets[-1])
        out = torch.full_like(inputs.z, torch.nan).contiguous()
        y = self.prefill(inputs, layout, out)
        assert y.data_ptr() == out.data_ptr()
        tokens, expected = tokens_of(inputs), []
        for row, start, begin, end in zip(rows, starts, offsets, offsets[1:], strict=False):
            state = self.states[row] if start else torch.zeros(self.state.shape[1:], dtype=torch.float64)
            for token in tokens[begin:end]:
                state, out = self.step(state, token)
                expected.append(out)
            self.states[row], self.count[row] = state, 0
            stored = self.state[row].double().cpu()
            torch.testing.assert_close(stored, state, rtol=self.slack, atol=4 * self.slack)
        self.check(y, expected)

    def verifies(self, nodes: int, tree: bool, rounds: int) -> None:
        """All sequences and a padding row, a random part of what is drafted kept each time."""
        rows = [*self.states, 0]
        padding = [item[0].clone() for item in (self.state, *self.pending)]
        on_device = partial(torch.tensor, device=self.device)
        for _ in range(rounds):
            parents = [random_parents(self.random, nodes, tree) for _ in rows]
            replay = StateReplay(
                on_device(rows), self.count.to(self.device), self.kept.to(self.device) if tree else None,
                on_device([ancestor_masks(item) for item in parents]) if tree else None,
            )  # fmt: skip
            inputs = self.inputs(len(rows) * nodes)
            y = self.verify(inputs, self.pending, replay)
            tokens, expected = tokens_of(inputs), []
            for index, (row, tree_of) in enumerate(zip(rows, parents, strict=True)):
                if not row:
                    assert y[index * nodes :].isfinite().all()
                    break
                before, stored = self.states[row], self.state[row].double().cpu()
                torch.testing.assert_close(stored, before, rtol=self.slack, atol=4 * self.slack)
                states: list[torch.Tensor] = []
                for node in range(nodes):
                    parent = states[tree_of[node - 1]] if node else before
                    state, out = self.step(parent, tokens[index * nodes + node])
                    states.append(state)
                    expected.append(out)
                last = self.random.randrange(nodes)
                path = path_of(tree_of, last)
                self.states[row], self.count[row] = states[last], len(path)
                self.kept[row, : len(path)] = torch.tensor(path)
            self.check(y[: len(expected)], expected)
        assert all(map(torch.equal, padding, (item[0] for item in (self.state, *self.pending))))
        free = [row for row in range(ROWS) if row not in rows]
        assert all(item[free].isnan().all() for item in (self.state, *self.pending))


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    first_quick(
        1, [(torch.float32, (1, 3, 24, 20)), (torch.float16, (2, 4, 40, 24)), (torch.bfloat16, (3, 6, 128, 128))]
    ),
)
def test_prompts_and_verifies(
    device: torch.device, twin: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]
) -> None:
    case = Case(device, dtype, twin, sizes)
    is_slow = twin == "deterministic" and device.type == "cpu"  # it goes row by row, and has no chunks
    chunk = 4 if is_slow else 16 if dtype == torch.float32 else 64
    case.prompt([(3, 0, 2), (5, 0, chunk + 3), (1, 0, 1)])
    case.prompt([(1, 1, chunk + 2), (3, 2, 3)])
    case.verifies(1, False, 1)
    case.prompt([(3, 0, 5)])
    case.verifies(5, False, 1)
    case.verifies(7, True, 1 if is_slow else 2)


CHAINS = [
    (512, 1, torch.float32, torch.bfloat16),
    (0, 3, torch.float16, torch.float32),
    (0, 4, torch.float32, torch.float32),
    (0, 4, torch.bfloat16, torch.float32),
]


@pytest.mark.parametrize(
    ("twin", "few", "held", "dtype", "stored"),
    slow_but(
        [*((twin, *CHAINS[0]) for twin in TWINS), *((twin, *CHAINS[1]) for twin in ("reference", "kernel"))],
        [(twin, *case) for twin in TWINS for case in CHAINS],
    ),
)
def test_short_chains(
    device: torch.device, twin: str, few: int, held: int, dtype: torch.dtype, stored: torch.dtype
) -> None:
    """Of as many rows as are held at most, and of fewer; by many programs, and by few."""
    case = Case(device, dtype, twin, (2, 4, 24, 40), held=held, stored=stored)
    if twin == "kernel":
        case.verify = partial(case.verify, few=few)
    case.prompt([(3, 0, 5), (5, 0, 2)])
    for rows in dict.fromkeys((held, 1, max(1, held - 1))):
        case.verifies(rows, False, 1 + (rows == held))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_chains_of_many_requests(device: torch.device, dtype: torch.dtype) -> None:
    """A program has 64 columns of a state, the last one fewer."""
    case = Case(device, dtype, "kernel", (1, 2, 128, 80), held=4)
    case.verify = partial(case.verify, few=0, many=0)
    case.prompt([(3, 0, 5), (5, 0, 2)])
    for rows in (4, 2):
        case.verifies(rows, False, 2)


def test_columns_of_chains() -> None:
    heads = DeltaHeads(16, 32, 128, 128, *([torch.empty(0)] * 3), 1e-6)

    def columns(batch: int, rows: int = 4, precision: str = "tf32", **other: int) -> tuple[int, int | None]:
        return gated_delta_triton.columns_of_chain(replace(heads, **other), batch, rows, 32, precision)

    assert columns(64) == (64, 96)
    assert columns(63) == (32, None)
    assert columns(64, rows=5) == (32, 128)
    assert columns(64, precision="ieee") == (32, None)
    assert columns(512, value_dim=32) == (32, None)


@pytest.mark.parametrize("chunk", [32, 64])
def test_chunks(device: torch.device, chunk: int) -> None:
    case = Case(device, torch.float32, "kernel", (1, 2, 16, 16))
    case.prefill = partial(case.prefill, chunk=chunk)
    case.prompt([(4, 0, 70), (2, 0, 2)])
    case.prompt([(4, 70, 100)])


@pytest.mark.parametrize("processors", [0, 132])
def test_chunks_in_flight(device: torch.device, processors: int) -> None:
    """Fewer chunks are in flight where two programs share a processor."""
    case = Case(device, torch.float16, "kernel", (1, 2, 128, 64))
    case.prefill = partial(case.prefill, processors=processors)
    case.prompt([(4, 0, 140), (2, 0, 70)])
    case.prompt([(2, 70, 75), (4, 140, 141)])


@pytest.mark.parametrize("twin", ["reference", "kernel"])
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_precision_states(device: torch.device, twin: str, stored: torch.dtype) -> None:
    case = Case(device, torch.float32, twin, (1, 2, 16, 16), stored=stored)
    case.prompt([(3, 0, 20)])
    case.verifies(4, False, 2)


@pytest.mark.parametrize("twin", ["reference", "kernel"])
def test_wide_trees(device: torch.device, twin: str) -> None:
    case = Case(device, torch.float16, twin, (1, 1, 16, 16), held=64)
    case.prompt([(4, 0, 3)])
    case.verifies(18, False, 1)
    case.verifies(64, True, 2)
    case.verifies(33, True, 1)


@pytest.mark.parametrize("twin", ["reference", "kernel"])
def test_head_dim_256(device: torch.device, twin: str) -> None:
    case = Case(device, torch.float32, twin, (1, 1, 256, 256))
    case.prompt([(4, 0, 19)])
    case.verifies(2, False, 2)


def test_ragged_batch_at_fixed_addresses(device: torch.device) -> None:
    case = Case(device, torch.float32, "kernel", (1, 2, 16, 16))
    check = case.check
    case.check = lambda y, expected: check(y[: len(expected)], expected)  # type: ignore[method-assign]
    case.prompt([(4, 0, 21), (2, 0, 2)], recorded=True)


def test_equal_keys_without_decay(device: torch.device) -> None:
    """The worst case of the inverse of a chunk: powers of its matrix would reach 10^18."""
    for twin in TWINS:
        case = Case(device, torch.float32, twin, (1, 1, 16, 16))
        if twin == "kernel":
            case.prefill = partial(case.prefill, chunk=64)
        case.heads.a_log.fill_(-30)
        plain = case.inputs

        def equal_keys(count: int, plain=plain) -> DeltaInputs:
            inputs = plain(count)
            inputs.qkv[:, 16:32] = 1
            inputs.b.fill_(9)
            return inputs

        case.inputs = equal_keys  # type: ignore[method-assign]
        case.prompt([(4, 0, 130)])
        case.verifies(8, False, 2)


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_matches_transformers(device: torch.device, name: str) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    case = Case(device, torch.float32, "reference", (2, 4, 16, 24))
    inputs, h = case.inputs(75), case.heads
    table = torch.zeros(ROWS, 1, dtype=torch.int64, device=device)
    y = gated_delta.delta_prefill(inputs, RaggedBatch([0], [75], [3], table, 16))
    q, k, v = inputs.qkv.split([32, 32, 96], 1)
    q, k = (x.reshape(1, 75, 2, 16).repeat_interleave(2, 2) for x in (q, k))
    g = -h.a_log.exp() * F.softplus(inputs.a + h.dt_bias)
    o, state = getattr(modeling, name)(
        q, k, v.reshape(1, 75, 4, 24), g=g[None], beta=inputs.b.sigmoid()[None], initial_state=None,
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    norm = modeling.Qwen3NextRMSNormGated(24, eps=h.eps).to(device)
    norm.weight.data = h.norm
    gated = norm(o.reshape(-1, 24), inputs.z.reshape(-1, 24)).view(75, -1)
    torch.testing.assert_close(y, gated, rtol=1e-5, atol=4e-5)
    torch.testing.assert_close(case.state[3], state[0], rtol=1e-5, atol=4e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gated_norm_rounds_like_transformers(device: torch.device, dtype: torch.dtype) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    case = Case(device, dtype, "reference", (1, 3, 16, 24))
    o, z = (torch.randn(50, 3, 24).to(device, dtype) for _ in range(2))
    norm = modeling.Qwen3NextRMSNormGated(24, eps=case.heads.eps).to(device)
    norm.weight.data = case.heads.norm
    ours = gated_delta.gated_rms_norm_ref(o, z.flatten(1), case.heads)
    assert torch.equal(ours, norm(o, z).flatten(1))
