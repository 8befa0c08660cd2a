#!/usr/bin/env bash
# Triton's interpreter casts float32 beyond 448 to other e4m3 numbers (512 becomes 256, NaN 384); the GPU saturates.
#
# Versions: triton 3.9.0, torch 2.13.0 (CPU), numpy 2.4.0, Python 3.11.
# Expected: `.to(tl.float8e4nv)` of 512 and 1e4 is 448, as by cvt.rn.satfinite.e4m3x2.f32 in the PTX of the compiled kernel
#   (sm_90), and as by torch's cast on a CPU; NaN stays NaN.
# Seen: with TRITON_INTERPRET=1, 512 becomes 256, 600 becomes 288, 1e4 becomes 320, inf becomes 256 and NaN becomes 384.
#   Values up to 448 are cast as expected.
# Matters: a test that runs a kernel of an FP8 cache or GEMM in the interpreter sees plausible numbers where the GPU
#   saturates, and no NaN at all. specbatch clamps to the range before the cast and keeps NaN by itself, in kernels and
#   references, and tests both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check triton==3.9.0
cat > "$folder/cast.py" <<'PYTHON'
import torch
import triton
import triton.language as tl


@triton.jit
def cast_kernel(source, stored, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(stored + place, tl.load(source + place).to(tl.float8e4nv))


values = [1.0, 448.0, -448.0, 512.0, 600.0, 1e4, float("inf"), float("nan")]
source = torch.tensor(values)
stored = torch.zeros(len(values), dtype=torch.float8_e4m3fn)
cast_kernel[(1,)](source, stored, COUNT=len(values))
by_triton, by_torch = stored.float().tolist(), source.to(torch.float8_e4m3fn).float().tolist()
for value, one, other in zip(values, by_triton, by_torch):
    print(f"{value:>8} -> interpreter {one:>8}, torch {other:>8}")
assert by_triton[:3] == by_torch[:3] == values[:3], "values within the range differ"
assert by_torch[3:6] == [448.0] * 3 and by_torch[7] != by_torch[7], "torch does not saturate or loses NaN"
assert by_triton[3:] == [256.0, 288.0, 320.0, 256.0, 384.0], "the interpreter casts in another way"
print(f"ok: the interpreter of triton {triton.__version__} wraps where torch {torch.__version__} saturates")
PYTHON
TRITON_INTERPRET=1 "$folder/venv/bin/python" -W ignore "$folder/cast.py"
