"""A real llama.cpp server on loopback, in a process of its own, with or without drafts.

It comes from the package xllamacpp, without which tests that need it are skipped. By hand:

    python tests/kit/llamacpp_server.py MODEL.gguf --drafts model --port 8000
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DRAFTS = {"none": "NONE", "model": "DRAFT_SIMPLE", "ngram": "NGRAM_SIMPLE"}


def start(arguments: argparse.Namespace) -> Any:
    """The server, in this process."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = arguments.model, {arguments.name}
    if arguments.drafts != "none":
        kind = f"COMMON_SPECULATIVE_TYPE_{DRAFTS[arguments.drafts]}"
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
    if arguments.drafts == "model":
        params.speculative.draft.mparams.path = arguments.draft or arguments.model
    params.speculative.draft.n_max = arguments.draft_tokens
    params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = 3, arguments.draft_tokens
    params.n_parallel, params.n_ctx = arguments.slots, arguments.slots * arguments.context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = arguments.threads
    if arguments.samplers:
        params.sampling.samplers = arguments.samplers
    params.hostnames, params.port, params.verbosity = ["127.0.0.1"], arguments.port, -1
    params.endpoint_metrics, params.warmup = True, False
    return xllamacpp.Server(params)


def main() -> None:
    parser = argparse.ArgumentParser(description="llama.cpp's server, until standard input ends.")
    parser.add_argument("model", help="a .gguf file")
    parser.add_argument("--drafts", choices=DRAFTS, default="none", help="of a draft model, or of n-gram lookup")
    parser.add_argument("--draft", help="the draft model; default: the model itself")
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--name", default="smollm2-135m", help="of the model")
    parser.add_argument("--port", type=int, default=0, help="default: any free one")
    parser.add_argument("--slots", type=int, default=4, help="requests at a time")
    parser.add_argument("--context", type=int, default=2048, help="tokens per slot")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--samplers", help="the chain of samplers, such as top_k;top_p;temperature")
    server = start(parser.parse_args())
    print(server.listening_address, flush=True)
    sys.stdin.read()
    os._exit(0)  # it does not always end by itself


def write_changed(model: Path, changed: Path, *, skip: range = range(0), **changes: Any) -> Path:
    """A copy of a .gguf file without some layers and with other values of keys (with _ for .)."""
    import gguf

    reader = gguf.GGUFReader(model)
    kept = [layer for layer in range(reader.fields["llama.block_count"].contents()) if layer not in skip]
    changes["llama_block_count"] = len(kept)
    writer = gguf.GGUFWriter(changed, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            value = changes.get(name.replace(".", "_"), field.contents())
            element = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, value, field.types[0], element)
    for tensor in reader.tensors:
        head, _, rest = tensor.name.partition("blk.")
        number, _, name = rest.partition(".")
        if head or not rest or int(number) in kept:
            renamed = f"blk.{kept.index(int(number))}.{name}" if rest else tensor.name
            writer.add_tensor(renamed, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return changed


@contextmanager
def serving_llamacpp(model: Path, *options: str) -> Iterator[str]:
    """Its address."""
    words = [sys.executable, __file__, str(model), *options]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert address.startswith("http://"), "the server did not start"
            yield address
        finally:
            process.stdin.close()
            process.wait(20)


if __name__ == "__main__":
    main()
