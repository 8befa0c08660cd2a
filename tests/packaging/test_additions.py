"""An addition touches few files: no other part of the product names an algorithm, a family or a format.

Each exception has its reason. Without one, a fact about the addition belongs into its modules or its registry entry.
"""

from __future__ import annotations

import pytest
from named_in import files_naming
from targets import TARGETS

from specbatch.algorithms import ALGORITHMS, NO_SPECULATION
from specbatch.models.formats.registry import FORMATS
from specbatch.models.registry import FAMILIES, family_modules

COMMANDS = (
    *("specbatch/cli/advise.py", "specbatch/cli/options.py"),
    *("specbatch/config/speculation.py", "sweeps/run/configurations.py"),
)
MICROBENCHMARKS = ("sweeps/microbench/acceptance.py", "sweeps/microbench/equal_rows.py")
# Algorithm -> why files name it -> these files.
ALGORITHM_IN: dict[str, dict[str, tuple[str, ...]]] = {
    "ngram": {
        "the default of commands that speculate": COMMANDS,
        "its settings are fields of records": ("specbatch/records/intervals.py", "sweeps/report/engine_flags.py"),
        "the corpus is looked up by n-grams, too": ("specbatch/drafters/corpus_files.py",),
        "an option of transformers": ("evals/generation.py", "evals/generation_config.py"),
        "the cheapest drafts, for a benchmark": ("sweeps/bench/sections.py", *MICROBENCHMARKS),
        "an example in a message or note": (
            "specbatch/config/engine_config.py",
            "sweeps/report/acceptance_curve.py",
            "sweeps/report/point_notes.py",
        ),
    },
    "standalone": {
        "the default with --draft": (*COMMANDS, "specbatch/cli/bench.py"),
        "a benchmark": MICROBENCHMARKS,
    },
    "eagle": {
        "an example in help": ("specbatch/cli/advise.py",),
        "a flag of SGLang": ("sweeps/report/engine_flags.py",),
        "keys of config.json of EAGLE-3": tuple(
            f"specbatch/{folder}/eagle3.py" for folder in ("drafters", "models/heads", "training")
        ),
    },
    "eagle3": {
        "an example in help": ("specbatch/cli/advise.py",),
        "P-EAGLE extends it": ("specbatch/drafters/peagle.py", "specbatch/training/peagle.py"),
        "what else works, in an error": ("specbatch/drafters/mtp.py", "specbatch/training/mtp.py"),
        "the default to train": ("specbatch/training/recipe.py",),
    },
    "mtp": {
        "its modules": ("specbatch/drafters/mtp_layers.py", "specbatch/models/heads/layer_mtp.py"),
        "the head is part of the target's checkpoint": (
            "specbatch/models/config.py",
            "specbatch/models/families/deepseek.py",
            "specbatch/models/families/glm4_moe.py",
            "specbatch/training/answers.py",
            "specbatch/weights/checkpoint.py",
            "specbatch/weights/dummy.py",
            "specbatch/weights/folder.py",
            "specbatch/weights/gguf_checkpoint.py",
        ),
        "what else works, in an error": ("specbatch/training/head.py",),
    },
    "nextn": {"names in files of DeepSeek-V3": ("specbatch/models/config.py", "specbatch/models/families/glm4_moe.py")},
    "dflash": {
        "others extend it": tuple(
            f"specbatch/{folder}/{name}.py"
            for folder in ("drafters", "models/heads", "training")
            for name in ("dflash2", "dspark", "domino", "lilicorr", "xpress")
        ),
        "keys of config.json": ("specbatch/drafters/peagle.py",),
        "a benchmark": MICROBENCHMARKS,
    },
    "dflash2": {
        "LiLiCorr may have its convolutions": (
            "specbatch/drafters/lilicorr.py",
            "specbatch/models/heads/lilicorr.py",
        ),
    },
    "uno": {
        "an option of git": ("specbatch/records/provenance.py",),
        "folders with a LoRA and no model": ("specbatch/weights/folder.py",),
    },
    "dspark": {
        "keys of config.json": ("specbatch/models/heads/dflash.py",),
        "others choose one after the other as it does": tuple(
            f"specbatch/{folder}/{name}.py" for folder in ("drafters", "models/heads") for name in ("domino", "xpress")
        ),
    },
}
# Family -> the same.
FAMILY_IN: dict[str, dict[str, tuple[str, ...]]] = {
    "llama": {
        "heads have its layers": tuple(
            f"specbatch/{name}.py"
            for name in (
                "models/heads/dflash", "models/heads/dflash2", "models/heads/draft_head", "models/heads/eagle",
                "models/heads/eagle3", "models/heads/uno", "training/eagle", "training/eagle3",
            )
        ),
        "the dense families share a config": ("specbatch/models/config.py", "specbatch/models/layer_types.py"),
        "a tool and a tokenizer of GGUF": tuple(f"specbatch/weights/gguf_{name}.py" for name in ("file", "tokenizer")),
        "the benchmark beside llama.cpp": ("sweeps/microbench/__main__.py", "sweeps/microbench/cpu_llama.py"),
        "a server and a model of benchmarks": (
            "specbatch/servers/sent_params.py",
            "specbatch/servers/served_model.py",
            "specbatch/servers/server_counters.py",
            "sweeps/microbench/cublas_algorithms.py",
        ),
    },
    "qwen3_next": {"MTP heads have its layers": ("specbatch/models/heads/mtp.py",)},
    "deepseek": {
        "others have its mixtures": ("specbatch/models/layers/deepseek_moe.py",),
        "its MTP layer": ("specbatch/models/heads/layer_mtp.py",),
    },
    "glm4_moe": {"its MTP layer": ("specbatch/models/heads/layer_mtp.py",)},
    "lfm2": {"the name of its tokenizer": ("specbatch/weights/gguf_tokenizer.py",)},
}  # fmt: skip
# Architecture of config.json -> the same.
ARCHITECTURE_IN: dict[str, dict[str, tuple[str, ...]]] = {
    "LlamaForCausalLM": {
        "random weights of a head": ("specbatch/drafters/head_checks.py",),
        "a benchmark": ("sweeps/microbench/job_memory.py",),
    },
}
METHODS = ("gptq", "quark")  # readers of quantization methods whose layers may have several formats
# Quantization format -> the same. FP8 is also a type of activations and of KV caches: only imports of its format count.
FORMAT_IN: dict[str, dict[str, tuple[str, ...]]] = {
    "fp8": {
        "drafts in FP8": (
            "specbatch/engine/setup/memory_plan.py", "specbatch/models/weight_reader.py", "specbatch/runtime/loader.py",
        ),
    },
    "int4": {
        "GEMMs of experts": ("kernels/moe/experts_triton.py",),
        "a benchmark": ("sweeps/microbench/gemm.py", "sweeps/microbench/gemm_tiles.py"),
    },
    "mxfp4": {
        "GEMMs of experts": ("kernels/moe/experts_triton.py",),
        "the experts of gpt-oss": ("specbatch/models/families/gpt_oss.py",),
        "experts of GGUF files": ("specbatch/models/gguf_layout.py", "specbatch/weights/gguf_tensors.py"),
        "matrices that are no experts of gpt-oss": ("specbatch/models/formats/fp4.py",),
        "a benchmark": ("sweeps/microbench/moe.py",),
    },
}  # fmt: skip


def unexplained(name: str, own: set[str], reasons: dict[str, tuple[str, ...]]) -> set[str]:
    """Files that name it, besides its own and those with a reason."""
    return files_naming(name) - own - {path for paths in reasons.values() for path in paths}


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != NO_SPECULATION])
def test_files_that_name_an_algorithm(name: str) -> None:
    entry = ALGORITHMS[name]
    modules = {entry.module, entry.training.module if entry.training else entry.module}
    own = {f"{module.replace('.', '/')}.py" for module in modules}
    own |= {"specbatch/algorithms.py", f"specbatch/models/heads/{name}.py"}
    own |= {f"kernels/drafting/{name}{end}.py" for end in ("", "_triton")}
    assert unexplained(name, own, ALGORITHM_IN.get(name, {})) == set()


@pytest.mark.parametrize(
    "architecture", sorted(FAMILIES.keys() | {name for item in TARGETS.values() for name in item["architectures"]})
)
def test_files_that_name_an_architecture(architecture: str) -> None:
    found = unexplained(architecture, {"specbatch/models/registry.py"}, ARCHITECTURE_IN.get(architecture, {}))
    assert {path for path in found if not path.startswith("specbatch/models/families/")} == set()


@pytest.mark.parametrize("module", family_modules())
def test_files_that_name_a_family(module: str) -> None:
    name = module.rpartition(".")[2]
    found = unexplained(name, {"specbatch/models/registry.py"}, FAMILY_IN.get(name, {}))
    assert {path for path in found if not path.startswith("specbatch/models/families/")} == set()  # some extend others


@pytest.mark.parametrize("module", [form.__module__ for form in FORMATS])
def test_files_that_name_a_format(module: str) -> None:
    name = module.rpartition(".")[2]
    own = {f"specbatch/models/formats/{file}.py" for file in ("registry", name, *METHODS)}
    found = unexplained("formats.fp8" if name == "fp8" else name, own, FORMAT_IN.get(name, {}))
    assert {path for path in found if not path.startswith("kernels/gemm/quantized/")} == set()  # its kernels
