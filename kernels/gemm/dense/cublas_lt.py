"""BF16 GEMMs by cuBLASLt with algorithms that a search found, where they take less time than those of its heuristic.

`cublas_lt_configs` has the algorithms, none of which splits K. Other versions of cuBLASLt, other GPUs and other sizes
have none. API: https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch

from specbatch.kernels.common.rehearsal import is_rehearsing
from specbatch.kernels.common.sizes import multiprocessors
from specbatch.kernels.gemm.dense.cublas_lt_configs import GPU, MULTIPROCESSORS, VERSION, Algorithm, algorithm_for

# Values of cuBLASLt's enumerations.
_BF16, _FP32, _COMPUTE_FP32, _TRANSPOSED, _TRANS_A = 14, 0, 68, 1, 3
_KERNELS, _STAGES = 66, 35  # its kernels for Hopper, and their only number of stages
_TILE, _OPTION, _STAGES_OF, _CLUSTER = (1, 4), (5, 4), (6, 4), (8, 2)  # attributes of an algorithm, and their bytes
_TILE_IDS, _MOST_OPTIONS = 6, 7  # attributes of what kernels can do
_ALIGNMENT = 8  # elements, of every row


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t, whose address is also that of its algorithm."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


class Sizes(NamedTuple):
    """x [m, k] @ weight [n, k].T -> y [m, n], and elements from one row to the next of x and of y."""

    m: int
    n: int
    k: int
    x_stride: int
    y_stride: int


def linear(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor | None:
    """x [T, K] @ weight [N, K].T + residual [T, N] -> [T, N] in `out` or in the memory of the residual, if one of them
    is given.

    None, and nothing is computed, for sizes, GPUs and operands that no algorithm is for, and in a rehearsal, which must
    not compute: the caller then uses torch, which also refuses what does not fit together.
    """
    algorithm = algorithm_for(len(x), *weight.shape)
    if algorithm is None or is_rehearsing() or not is_supported(x.device):
        return None
    y = out if residual is None else residual
    if y is None:
        y = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    is_one = residual is None or out is None
    if not (is_one and weight.is_contiguous() and _fits(x, weight, y)):
        return None
    gemm = _gemm(x.device, Sizes(len(x), weight.shape[0], weight.shape[1], x.stride(0), y.stride(0)), algorithm)
    if gemm is None:
        return None
    gemm(x, weight, y, adds=residual is not None)
    return y


def _fits(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether cuBLASLt, which gets addresses alone, may read and write these operands."""
    is_here = x.device == weight.device == y.device and (not x.is_cuda or x.device.index == torch.cuda.current_device())
    is_bf16 = x.dtype == weight.dtype == y.dtype == torch.bfloat16
    has_sizes = x.shape[1:] == weight.shape[1:] and y.shape == (len(x), len(weight))
    return is_here and is_bf16 and has_sizes and all(map(_is_aligned, (x, weight, y)))


def _is_aligned(matrix: torch.Tensor) -> bool:
    is_even = matrix.stride(0) % _ALIGNMENT == 0 and matrix.data_ptr() % (2 * _ALIGNMENT) == 0
    return is_even and matrix.stride(1) == 1


class Gemm:
    """A GEMM of given sizes by one algorithm."""

    def __init__(self, device: torch.device, sizes: Sizes, algorithm: Algorithm) -> None:
        """LookupError: cuBLASLt has no such algorithm for these sizes."""
        self._library, self._handle = _library(), _handle(device)
        self._operation = _created(self._library.cublasLtMatmulDescCreate, _COMPUTE_FP32, _FP32)
        flag = ctypes.c_int32(_TRANSPOSED)
        _check(self._library.cublasLtMatmulDescSetAttribute(self._operation, _TRANS_A, ctypes.byref(flag), 4))
        # cuBLASLt counts in columns: y.T = weight @ x.T, where the weight is stored transposed.
        self._weight = self._layout(sizes.k, sizes.n, sizes.k)
        self._x = self._layout(sizes.k, sizes.m, sizes.x_stride)
        self._y = self._layout(sizes.n, sizes.m, sizes.y_stride)
        self._algorithm, self._workspace = self._configured(algorithm)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, *, adds: bool) -> None:
        """adds: to y, in place of overwriting it."""
        weight_at, x_at, y_at = (ctypes.c_void_p(matrix.data_ptr()) for matrix in (weight, x, y))
        workspace = torch.empty(self._workspace, dtype=torch.uint8, device=x.device) if self._workspace else None
        one, before = ctypes.c_float(1), ctypes.c_float(adds)
        stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
        _check(
            self._library.cublasLtMatmul(
                self._handle, self._operation, ctypes.byref(one), weight_at, self._weight, x_at, self._x,
                ctypes.byref(before), y_at, self._y, y_at, self._y, ctypes.byref(self._algorithm),
                ctypes.c_void_p(None if workspace is None else workspace.data_ptr()), ctypes.c_size_t(self._workspace),
                stream,
            )
        )  # fmt: skip

    def _layout(self, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride)
        return _created(self._library.cublasLtMatrixLayoutCreate, _BF16, *sizes)

    def _configured(self, algorithm: Algorithm) -> tuple[_Found, int]:
        """As cuBLASLt has it, and bytes of workspace that it needs."""
        found, checked = _initial(self._handle), _Found()
        values = (_TILE, algorithm.tile), (_OPTION, algorithm.option), (_STAGES_OF, _STAGES)
        for (attribute, size), value in (*values, (_CLUSTER, algorithm.cluster)):
            number = ctypes.byref(ctypes.c_uint32(value))
            if self._library.cublasLtMatmulAlgoConfigSetAttribute(ctypes.byref(found), attribute, number, size):
                raise LookupError(algorithm)
        layouts = self._weight, self._x, self._y, self._y
        operands = self._handle, self._operation, *layouts, ctypes.byref(found), ctypes.byref(checked)
        if self._library.cublasLtMatmulAlgoCheck(*operands):
            raise LookupError(algorithm)
        return found, int(checked.workspace)


@cache
def _gemm(device: torch.device, sizes: Sizes, algorithm: Algorithm) -> Gemm | None:
    try:
        return Gemm(device, sizes, algorithm)
    except LookupError:  # rows that are further apart than those of the search
        return None


def tiles_and_options(device: torch.device) -> tuple[list[int], int]:
    """What a search can try, of which few exist for given sizes: ids of tiles, and the number of a kernel's options."""
    found, written = _initial(_handle(device)), ctypes.c_size_t()
    tiles, options = (ctypes.c_int32 * 4096)(), ctypes.c_int32()
    property_of, first = _library().cublasLtMatmulAlgoCapGetAttribute, ctypes.byref(found)
    _check(property_of(first, _MOST_OPTIONS, ctypes.byref(options), 4, ctypes.byref(written)))
    _check(property_of(first, _TILE_IDS, tiles, ctypes.sizeof(tiles), ctypes.byref(written)))
    return tiles[: written.value // 4], options.value + 1


@cache
def is_supported(device: torch.device, gpu: str = GPU) -> bool:
    """Whether the search was for this device, a `gpu`, and this cuBLASLt."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    if torch.cuda.get_device_name(device) != gpu or multiprocessors(device) != MULTIPROCESSORS:
        return False
    try:
        return int(_library().cublasLtGetVersion()) == VERSION
    except OSError:
        return False


@cache
def _library() -> Any:
    """OSError: there is none. PyTorch has loaded the same one."""
    library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library


@cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    with torch.cuda.device(device):
        return _created(_library().cublasLtCreate)


def _initial(handle: ctypes.c_void_p) -> _Found:
    found, types = _Found(), (_COMPUTE_FP32, _FP32, _BF16, _BF16, _BF16, _BF16)
    _check(_library().cublasLtMatmulAlgoInit(handle, *types, _KERNELS, ctypes.byref(found)))
    return found


def _created(create: Any, *arguments: Any) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    _check(create(ctypes.byref(made), *arguments))
    return made


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt failed with status {status}")
