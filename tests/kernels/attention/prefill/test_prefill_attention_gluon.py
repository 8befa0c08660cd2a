"""Prefill attention for Hopper matches float64, on a CPU in an emulation of Gluon."""

from __future__ import annotations

import pytest
import torch
from dtypes import HALVES
from gluon_emulation import emulated
from paged_prompts import Case
from watched_calls import Watch

from specbatch.kernels.attention.hopper import Tiling
from specbatch.kernels.attention.prefill import prefill_attention_gluon, prefill_attention_triton
from specbatch.kernels.attention.prefill.prefill_attention_gluon import prefill_attention
from specbatch.kernels.attention.prefill.prefill_backends import GluonPrefill
from specbatch.kernels.attention.ragged_batch import StaticRaggedBatch

Spans = list[tuple[int, int]]


@pytest.fixture(autouse=True)
def _emulated(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type != "cuda":
        kernel = emulated(prefill_attention_gluon.prefill_attention_kernel)
        monkeypatch.setattr(prefill_attention_gluon, "prefill_attention_kernel", kernel)
    elif torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a Hopper GPU")


@pytest.fixture(params=HALVES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("spans", "heads", "window", "page_size"),
    [
        ([(0, 1)], (4, 2, 64), 0, 16),
        ([(0, 133), (0, 1), (0, 128)], (4, 2, 64), 0, 16),
        ([(0, 5), (377, 500), (16, 17)], (4, 2, 64), 0, 16),
        ([(100, 233), (0, 50)], (4, 1, 64), 0, 48),
        ([(40, 50), (0, 20)], (4, 4, 64), 0, 8),
        ([(250, 333), (0, 50)], (6, 2, 64), 0, 256),
        pytest.param([(60, 190)], (10, 2, 64), 0, 16, marks=pytest.mark.slow),
        pytest.param([(100, 233), (0, 50)], (4, 4, 64), 0, 8, marks=pytest.mark.slow),
        pytest.param([(0, 70)], (7, 1, 128), 0, 16, marks=pytest.mark.slow),
        ([(0, 40)], (16, 1, 128), 0, 64),
        ([(33, 140)], (4, 2, 256), 0, 16),
        ([(0, 200), (200, 300)], (4, 2, 64), 128, 16),
        ([(0, 80)], (4, 2, 64), 1, 16),
        ([(380, 510)], (8, 2, 64), 300, 32),
        ([(1500, 1530)], (8, 2, 64), 0, 16),
        ([(1500, 1530)], (8, 2, 64), 700, 16),
    ],
)
def test_prefill_attention_matches_reference(
    device: torch.device, dtype: torch.dtype, spans: Spans, heads: tuple[int, int, int], window: int, page_size: int
) -> None:
    case = Case(device, dtype, spans, heads, page_size)
    case.check(prefill_attention(case.inputs(window)), window)
    if case.layout.fresh:
        case.k_cache.fill_(torch.nan)  # not read
        case.check(prefill_attention(case.inputs(window, own=True)), window)


@pytest.mark.parametrize(
    ("spans", "window"), [([(0, 133), (200, 300)], 0), ([(263, 401), (0, 40)], 100), ([(1500, 1503)], 0)]
)
def test_sinks(device: torch.device, dtype: torch.dtype, spans: Spans, window: int) -> None:
    case = Case(device, dtype, spans, (8, 2, 64))
    sinks = 2 * torch.randn(8, device=device)
    case.check(prefill_attention(case.inputs(window, sinks)), window, sinks)


@pytest.mark.parametrize("tile", [Tiling(64, 4), Tiling(128, 3), Tiling(64, 2)], ids=str)
def test_tiles(device: torch.device, dtype: torch.dtype, tile: Tiling) -> None:
    case = Case(device, dtype, [(0, 133), (200, 420)], (4, 2, 64))
    case.check(prefill_attention(case.inputs(), tile))


@pytest.mark.parametrize("own", [True, False])
def test_slots_past_the_sequence_are_ignored(device: torch.device, dtype: torch.dtype, own: bool) -> None:
    """Another prompt's values, or what a page held before, may be NaN."""
    case = Case(device, dtype, [(0, 20), (0, 137)], (8, 2, 64), 32)
    clean = prefill_attention(case.inputs(own=own))
    for new in case.new:
        new[20:] = torch.nan  # the second prompt
    for cache in (case.k_cache, case.v_cache):
        for row, end in zip(case.layout.rows, case.layout.ends, strict=True):
            cache[int(case.layout.page_table[row, (end - 1) // 32]), (end - 1) % 32 + 1 :] = torch.nan
    out = prefill_attention(case.inputs(own=own))
    assert torch.equal(out[:20], clean[:20])
    assert out[:20].isfinite().all()
    assert own or torch.equal(out, clean)


def test_strided_rows(device: torch.device, dtype: torch.dtype) -> None:
    """Queries and values as views of the rows of a projection."""
    case = Case(device, dtype, [(0, 150)], (8, 2, 64))
    rows = torch.full((150, 12, 64), torch.nan, dtype=dtype, device=device)
    rows[:, :8], rows[:, 10:] = case.q, case.new[1]
    inputs = case.inputs(own=True)._replace(q=rows[:, :8], v_new=rows[:, 10:])
    case.check(prefill_attention(inputs))


@pytest.mark.parametrize("fresh", [True, False])
def test_ragged_batch_at_fixed_addresses_is_reusable(device: torch.device, dtype: torch.dtype, fresh: bool) -> None:
    recorded: StaticRaggedBatch | None = None
    for spans in [[(0, 30), (0, 1), (0, 17)], [(0, 48)]] if fresh else [[(7, 37), (50, 51), (0, 17)], [(12, 60)]]:
        case = Case(device, dtype, spans, (4, 2, 64))
        total = case.layout.offsets[-1]
        if recorded is None:
            recorded = StaticRaggedBatch(48, 3, case.layout.page_table.new_zeros(8, 8), 16, fresh=fresh)
            recorded.tiles(64)  # as at graph capture, before the first pass is known
        recorded.page_table.zero_()
        height, width = case.layout.page_table.shape
        recorded.page_table[:height, :width] = case.layout.page_table
        recorded.load(case.layout)
        padding = 48 - total
        q, k, v = (torch.cat([x, x.new_full((padding, *x.shape[1:]), torch.nan)]) for x in (case.q, *case.new))
        out = torch.full_like(q, torch.nan)
        prefill_attention(case.inputs()._replace(q=q, k_new=k, v_new=v, spans=recorded, out=out))
        case.check(out[:total])
        assert out[total:].isnan().all()


@pytest.mark.parametrize(
    ("spans", "own", "kernel"),
    [([(0, 130), (0, 5)], True, "gluon"), ([(64, 290), (0, 7)], False, "gluon"), ([(280, 290)], False, "triton")],
)
def test_fp8_caches(
    device: torch.device, dtype: torch.dtype, watch: Watch, spans: Spans, own: bool, kernel: str
) -> None:
    """The pass's own keys are of the type of the queries, and those of long chunks after a prefix are converted."""
    case = Case(device, dtype, spans, (8, 2, 64), stored=torch.float8_e4m3fn)
    if not own:
        case.scales = [torch.rand(2, device=device) + 0.5 for _ in range(2)]
    modules = {"gluon": prefill_attention_gluon, "triton": prefill_attention_triton}
    seen = {name: watch(module, "prefill_attention", before=lambda *_: 1) for name, module in modules.items()}
    case.check(GluonPrefill(0)(case.inputs(own=own)))
    assert {name: len(calls) for name, calls in seen.items()} == {"gluon": 0, "triton": 0} | {kernel: 1}


def test_many_short_prompts_are_for_triton(device: torch.device, dtype: torch.dtype, watch: Watch) -> None:
    modules = prefill_attention_gluon, prefill_attention_triton
    gluon, triton = (watch(module, "prefill_attention", before=lambda *_: 1) for module in modules)
    for spans, keys in (([(0, 60), (0, 20)], 25.5), ([(40, 60)], 50.5)):
        case = Case(device, dtype, spans, (4, 2, 64))
        assert case.layout.keys_per_query == keys
        case.check(GluonPrefill(40)(case.inputs()))
    assert (len(gluon), len(triton)) == (1, 1)
    table = torch.zeros(1, 8, dtype=torch.int64, device=device)
    whole = [StaticRaggedBatch(64, 2, table, 16, fresh=fresh).keys_per_query for fresh in (True, False)]
    assert whole == [32, 64]
