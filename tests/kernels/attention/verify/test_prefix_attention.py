"""Attention with shared prefixes matches the reference, which reads them for each sequence."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from crossed import first_quick, slow_but
from dtypes import DTYPES
from gluon_emulation import emulated
from shared_prefixes import shared
from verify_case import Case, tree

from specbatch.kernels.attention.queries import Mask
from specbatch.kernels.attention.verify import prefix_attention_gluon, verify_attention_triton
from specbatch.kernels.attention.verify.prefix_attention_configs import PrefixLaunch, PrefixTile, prefix_bytes
from specbatch.kernels.attention.verify.prefix_attention_triton import divide
from specbatch.kernels.attention.verify.verify_attention import DecodeAttentionRef, wrap_packed_rows
from specbatch.kernels.attention.verify.verify_attention_triton import verify_attention
from specbatch.kernels.common.packed_rows import pack_rows

Groups = list[tuple[list[int], int]]  # sequences and the keys of their prefix
TWO: Groups = [([0, 3, 4], 36), ([5, 1], 8)]  # the third sequence has none
LENGTHS = [40, 8, 13, 60, 36, 30]
SMALL, PLAIN = PrefixTile(16, 16, 4, 1), Mask()


def share(case: Case, groups: Groups) -> None:
    case.prefixes = shared(case.table, case.rows, groups, case.page_size)


@pytest.mark.parametrize("n", slow_but([5], [1, 4, 5, 16, 17]))
@pytest.mark.parametrize("splits", slow_but([2], [1, 2, 5]))
def test_chain(device: torch.device, n: int, splits: int) -> None:
    case = Case(device, torch.float32, LENGTHS, n)
    plain = case.check(splits)
    share(case, TWO)
    assert not torch.equal(case.check(splits, prefix_tile=SMALL), plain)
    case.check(splits)  # the tile of the rules


@pytest.mark.parametrize("dtype", slow_but([DTYPES[-1]], DTYPES))
@pytest.mark.parametrize(
    ("count", "kv", "dim"),
    first_quick(
        1, [(7, 1, 24), (4, 4, 80), (6, 2, 64), (5, 1, 96), (16, 1, 128), (8, 1, 128), (8, 2, 256), (3, 1, 512)]
    ),
)
def test_heads(device: torch.device, dtype: torch.dtype, count: int, kv: int, dim: int) -> None:
    case = Case(device, dtype, LENGTHS, 3, count=count, kv=kv, dim=dim)
    share(case, TWO)
    case.check(2)


@pytest.mark.parametrize(("page_size", "keys"), first_quick(1, [(16, 48), (1, 35), (32, 32), (64, 128), (48, 96)]))
def test_page_sizes(device: torch.device, page_size: int, keys: int) -> None:
    """Pages of a multiple of a step are copied in bulk, for 16-bit heads of a power of two."""
    case = Case(device, DTYPES[-1], [keys + 5, 3, keys, keys + 40], 3, page_size=page_size, dim=32)
    share(case, [([3, 0, 2], keys)])
    inputs = case.inputs(case.lengths, case.caches)
    is_bulk = PrefixLaunch.of(case.queries(case.lengths), inputs, SMALL).source == "pages"
    assert is_bulk == (page_size % SMALL.block_n == 0 and case.dtype != torch.float32)
    case.check(2, prefix_tile=SMALL)
    case.check(2, prefix_tile=PrefixTile(32, 32, 4, 2))


@pytest.mark.parametrize(
    "groups",
    first_quick(1, [
        [([1, 5], 2), ([0, 2, 3], 146), ([6, 4], 30)], [([0, 2, 3], 150)], [([1, 0, 2, 3, 4, 5, 6], 30)], [],
    ]),
)  # fmt: skip
def test_items_are_divided_among_few_programs(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, groups: Groups
) -> None:
    """Splits of several tiles, groups of other sizes, and more items than programs."""
    monkeypatch.setattr("specbatch.kernels.attention.verify.prefix_attention_configs.multiprocessors", lambda _: 6)
    case = Case(device, torch.float32, [151, 70, 150, 180, 80, 70, 30, 3], 7, page_size=2)
    share(case, groups)
    case.check(1, prefix_tile=SMALL)


@pytest.mark.parametrize("seed", slow_but([0], range(3)))
def test_work_is_divided_without_gaps(device: torch.device, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every tile of every group has all keys, once and in order; no split is empty, and there is room for all."""
    random = Random(seed)
    processors = random.randint(2, 40)
    monkeypatch.setattr(
        "specbatch.kernels.attention.verify.prefix_attention_configs.multiprocessors", lambda _: processors
    )
    lengths, n = [5000] * 12, random.choice([1, 3, 16])
    case = Case(device, torch.float32, lengths, n, page_size=10, kv=1)
    order, groups = random.sample(range(12), 12), []
    while len(order) > 1 and len(groups) < 4:
        count = random.randint(2, min(6, len(order)))
        groups.append((order[:count], 10 * random.randint(1, 499)))
        order = order[count:]
    share(case, groups)
    queries = case.queries(case.lengths)
    launch = PrefixLaunch.of(queries, case.inputs(case.lengths, case.caches), PrefixTile(16, 64, 4, 1))
    work = divide(queries, case.heads, launch)
    items, places = work.items[: int(work.end)].tolist(), work.places.tolist()
    assert len(items) * 16 <= launch.lines
    own, line, expected = n * 4, 0, []
    assert case.prefixes is not None
    for first, count, keys in case.prefixes.groups.T.tolist():
        if not count:
            continue
        tiles = -(-count * own // 16)
        found = [item for item in items if item[:2] == [first, count]]
        bounds = [item[3:] for item in found[::tiles]]
        assert [low for low, _ in bounds] == [0, *(high for _, high in bounds[:-1])]
        assert all(low < high for low, high in bounds)
        assert bounds[-1][1] == keys
        expected += [[first, count, tile, low, high] for low, high in bounds for tile in range(tiles)]
        for place, member in enumerate(case.prefixes.members[first : first + count].tolist()):
            assert places[member] == [line + place * own, tiles * 16, len(bounds)]
        line += len(found) * 16
    assert items == expected


@pytest.mark.parametrize("first", slow_but([6], [0, 6]))
@pytest.mark.parametrize("sinks", slow_but([True], [False, True]))
def test_trees(device: torch.device, first: int, sinks: bool) -> None:
    n = 9
    case = Case(device, torch.float32, [first + length for length in LENGTHS], n, sinks=sinks)
    words, depths = (item[:, first:].contiguous() for item in tree(len(LENGTHS), first + n, device))
    positions = (case.lengths[:, None] - first + depths).flatten()
    share(case, TWO)
    case.check(2, ancestors=words, positions=positions, first=first, prefix_tile=SMALL)


def test_blocks_and_windows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block whose tokens see each other; and layers with a window, which read every prefix."""
    case = Case(device, torch.float32, LENGTHS, 5, sinks=True)
    windowed = case.check(2, Mask(window=9))
    share(case, TWO)
    case.check(2, Mask(causal=False), prefix_tile=SMALL)
    monkeypatch.delattr(verify_attention_triton, "prefix_attention")
    case.table = case.table.clone()
    assert case.check(2, Mask(window=9)).shape == windowed.shape


@pytest.mark.parametrize(
    ("dtype", "scaled"), first_quick(1, [(DTYPES[-1], True), (torch.float32, False), (DTYPES[-1], False)])
)
def test_fp8_cache(device: torch.device, dtype: torch.dtype, scaled: bool) -> None:
    case = Case(device, dtype, LENGTHS, 4, cache=torch.float8_e4m3fn, norm=False)
    if device.type == "cpu":  # the interpreter rounds to FP8 differently than torch: use values that need no rounding
        case.qkv = (2 * case.qkv).round() / 2
        case.heads.cos.fill_(1), case.heads.sin.fill_(0)
    if scaled:
        case.scales = [2.0 ** (torch.arange(2, device=device) + first) for first in (-2, 1)]
    share(case, TWO)
    case.check(2, prefix_tile=SMALL)


def test_shared_keys_and_padding(device: torch.device) -> None:
    """Queries of a layer that has no keys of its own, beside rows of padding."""
    case = Case(device, torch.float32, [40, 0, 36, 0], 3, rows=[1, 0, 3, 0])
    case.qkv = case.qkv[:, : case.heads.count * case.heads.dim].contiguous()
    case.caches = [cache.nan_to_num(0) for cache in case.caches]
    case.heads, case.new = replace(case.heads, shared=True), case.new & False
    share(case, [([2, 0], 36)])
    case.check(2, prefix_tile=SMALL)


def test_padding_that_seems_to_share(device: torch.device) -> None:
    """A recording warms up with rows of padding, while the table is that of requests."""
    case = Case(device, torch.float32, [0, 0, 0], 2, rows=[0, 0, 0])
    case.caches = [cache.nan_to_num(0) for cache in case.caches]
    share(case, [([0, 1], 8)])
    queries = replace(case.queries(case.lengths + 1))
    assert verify_attention(queries, case.inputs(case.lengths, case.caches), PLAIN, splits=2).isfinite().all()


@pytest.mark.parametrize("is_shared", slow_but([False], [False, True]))
def test_packed_rows(device: torch.device, is_shared: bool) -> None:
    counts, most = [1, 18, 4, 17, 2, 1], 18
    case = Case(device, torch.float32, LENGTHS, most, sinks=True)
    share(case, TWO)
    packed = pack_rows(torch.tensor(counts, device=device), most, sum(counts))
    queries = replace(case.queries(case.lengths), packed=packed)
    positions = packed.pack((case.lengths[:, None] + torch.arange(most, device=device)).flatten())
    case.qkv, caches = packed.pack(case.qkv), [cache.nan_to_num(0) for cache in case.caches]
    reference = wrap_packed_rows(DecodeAttentionRef(queries), queries)
    expected = reference(case.inputs(positions, caches), PLAIN)
    if is_shared:  # an earlier layer has written the keys
        case.qkv = case.qkv[:, : case.heads.count * case.heads.dim].contiguous()
        case.heads = replace(case.heads, shared=True)
    out = verify_attention(queries, case.inputs(positions, caches), PLAIN, splits=2, prefix_tile=SMALL)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=2e-6)


@pytest.fixture
def on_hopper(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Gluon kernel, on a CPU in an emulation."""
    if device.type == "cpu":
        kernel = emulated(prefix_attention_gluon.prefix_attention_kernel)
        monkeypatch.setattr(prefix_attention_gluon, "prefix_attention_kernel", kernel)
    elif torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a Hopper GPU")


HOPPER = PrefixTile(128, 64, 4, 2, gluon=True)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("page_size", "dim", "count", "kv", "n", "keys", "norm"),
    first_quick(
        1,
        [
            (8, 64, 8, 1, 5, 200, False),
            (16, 64, 4, 2, 3, 128, True),
            (48, 128, 7, 1, 2, 336, True),
            (16, 64, 4, 4, 1, 400, True),
            (16, 128, 16, 2, 9, 144, False),
            (128, 64, 4, 2, 3, 128, True),
            (16, 256, 3, 1, 17, 80, True),
        ],
    ),
)
def test_chain_on_hopper(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, page_size: int, dim: int, count: int, kv: int, n: int,
    keys: int, norm: bool,
) -> None:  # fmt: skip
    """Blocks that are not full, several items for a program, copies of parts of pages."""
    processors = "specbatch.kernels.attention.verify.prefix_attention_configs.multiprocessors"
    monkeypatch.setattr(processors, lambda _: 3 * kv)
    small = page_size * -(-64 // page_size)
    lengths = [keys + 3, 9, keys, keys + 50, small + 5, small]
    case = Case(device, DTYPES[-1], lengths, n, count=count, kv=kv, dim=dim, page_size=page_size, norm=norm)
    share(case, [([0, 3, 2], keys), ([4, 5], small)])
    case.check(2, prefix_tile=HOPPER)
    if dim < 256:
        case.check(1, prefix_tile=replace(HOPPER, block_n=128))


@pytest.mark.slow
@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("is_packed", [False, True])
def test_trees_and_packed_rows_on_hopper(device: torch.device, is_packed: bool) -> None:
    n, lengths = 9, [length + 100 for length in LENGTHS]
    case = Case(device, DTYPES[-1], lengths, n, sinks=True, dim=64, page_size=8)
    share(case, [([0, 3, 4], 128), ([5, 1], 64)])
    if not is_packed:
        words, depths = tree(len(lengths), n, device)
        positions = (case.lengths[:, None] + depths).flatten()
        case.check(2, ancestors=words, positions=positions, prefix_tile=HOPPER)
        return
    counts = [1, 9, 4, 7, 2, 1]
    packed = pack_rows(torch.tensor(counts, device=device), n, sum(counts))
    queries = replace(case.queries(case.lengths), packed=packed)
    positions = packed.pack((case.lengths[:, None] + torch.arange(n, device=device)).flatten())
    case.qkv, caches = packed.pack(case.qkv), [cache.nan_to_num(0) for cache in case.caches]
    expected = wrap_packed_rows(DecodeAttentionRef(queries), queries)(case.inputs(positions, caches), PLAIN)
    out = verify_attention(queries, case.inputs(positions, caches), PLAIN, splits=2, prefix_tile=HOPPER)
    assert (out.double() - expected.double()).norm() < 1e-3 * expected.double().norm()


def test_memory_is_that_of_a_launch(device: torch.device) -> None:
    case = Case(device, DTYPES[-1], LENGTHS, 3, count=8, kv=2, dim=128)
    share(case, TWO)
    launch = PrefixLaunch.of(case.queries(case.lengths), case.inputs(case.lengths, case.caches))
    if case.dtype != torch.float32:
        assert prefix_bytes(len(LENGTHS), 3, 4, 8, 2, 128, device) == 2 * launch.lines * 129 * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_graph_for_any_groups(device: torch.device) -> None:
    """A graph reads groups from the device, layer after layer, and repeats its results bit by bit."""
    case = Case(device, torch.bfloat16, [300, 90, 64, 270, 131, 40], 4, count=8, dim=64, page_size=16, norm=False)
    share(case, [])
    arguments = case.queries(case.lengths), case.inputs(case.lengths, case.caches), PLAIN
    verify_attention(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [verify_attention(*arguments) for _ in range(8)]
    fixed = case.prefixes
    assert fixed is not None
    for groups in ([([0, 3], 256), ([1, 2, 4], 64)], [], [([3, 0, 1, 4], 80)], [([2, 5], 32)]):
        share(case, groups)
        assert case.prefixes is not None
        for place, part in zip(fixed, case.prefixes, strict=True):
            place.copy_(part)
        wanted = verify_attention(*arguments)
        torch.testing.assert_close(wanted, verify_attention(replace(arguments[0], prefixes=None), *arguments[1:]),
                                   rtol=2e-2, atol=2e-2)  # fmt: skip
        for _ in range(20):
            graph.replay()
            assert all(torch.equal(out, wanted) for out in outs)
