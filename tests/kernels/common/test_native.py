"""What the functions for a CPU need of the machine."""

from __future__ import annotations

from pathlib import Path

import torch

from specbatch.kernels.common.native import openmp_libraries

LINE = "7f3cd2400000-7f3cd2437000 r-xp 00000000 fe:00 5408608                    {}"


def test_the_openmp_library_of_torch_comes_first() -> None:
    own = Path(torch.__file__).resolve().parent / "lib/libgomp.so.1"
    others = [Path("/opt/a torch project/sklearn.libs/libgomp-a34b3233.so.1.0.0"), Path("/usr/lib/libomp.so.5")]
    paths = [others[1], own, own, others[0], Path("/usr/lib/libc.so.6"), Path("/usr/lib/a libgomp/x.so")]
    maps = "\n".join(["7ffd0000-7ffd1000 rw-p 00000000 00:00 0 [stack]", *map(LINE.format, paths)])
    assert openmp_libraries(maps) == [own, *others]
    assert openmp_libraries("") == []
