#!/usr/bin/env bash
# vLLM's XPress refiner chooses other drafts if num_speculative_tokens is less than the draft was trained for.
#
# Versions: vllm 0.33.0 (two files of the wheel), torch 2.13.0 (CPU), triton 3.9.0 (interpreter), Python 3.11.
# Expected: the refiner is causal, so with 3 or 5 drafts in place of 7 the first 3 or 5 are the same; or vLLM refuses the
#   setting, as it does for a DSpark draft of Qwen3-Omni.
# Seen: with 7 of 7 drafts all are those of the refiner's own definition in PyTorch, with 5 of 7 8%, and with 3 none. The
#   kernel takes the number of served positions as the row length of the mixer, a table with a row and a column for every
#   trained position, and reads other entries: of 4 positions, the second reads zeros above the diagonal only.
# Matters: num_speculative_tokens is tuned, mostly down, for large batches. Answers stay those of the target, but the accept
#   length falls to that of wrong drafts, without a warning. specbatch takes the part of the mixer for served positions.
# How: vLLM's kernels and refiner class run as they are in the wheel; of what their files import, only Triton and top-k
#   are needed here. The part of the hidden states' mean is zero, since it alone depends on all positions of a block.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" "$@" --quiet --disable-pip-version-check; }
pip install torch==2.13.0 numpy==2.4.0
pip install triton==3.9.0
pip download --no-deps --only-binary :all: --dest "$folder/wheel" vllm==0.33.0
"$folder/venv/bin/python" -m zipfile -e "$folder"/wheel/vllm-0.33.0-*.whl "$folder/files"
cat > "$folder/run.py" <<'PYTHON'
import importlib.util
import sys
import types

import torch
import triton
import triton.language as tl

MODULES = {
    "vllm": {}, "vllm.triton_utils": {"tl": tl, "triton": triton}, "vllm.config": {"VllmConfig": object},
    "vllm.logger": {"init_logger": lambda name: None}, "vllm.model_executor": {}, "vllm.model_executor.models": {},
    "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.logits_processor": {"LogitsProcessor": object, "_topk": torch.topk},
    "vllm.model_executor.layers.vocab_parallel_embedding": {"ParallelLMHead": object},
    "vllm.model_executor.models.qwen3_dflash": {"DFlashQwen3ForCausalLM": object, "DFlashQwen3Model": object},
    "vllm.model_executor.models.utils": {
        "AutoWeightsLoader": object, "maybe_prefix": object, "process_eagle_weight": object},
    "vllm.v1": {}, "vllm.v1.worker": {}, "vllm.v1.worker.gpu": {}, "vllm.v1.worker.gpu.spec_decode": {},
    "vllm.v1.worker.gpu.spec_decode.xpress": {},
}  # what the two files import and the head does not call, but for Triton and topk
for name, contents in MODULES.items():
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(contents)
    sys.modules[name] = module


def load(name: str) -> types.ModuleType:
    """A module of the wheel, from its own file."""
    spec = importlib.util.spec_from_file_location(name, f"{sys.argv[1]}/{name.replace('.', '/')}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    return module


load("vllm.v1.worker.gpu.spec_decode.xpress.kernels")
head_class = load("vllm.model_executor.models.qwen3_xpress").XPressRefinerHead
TRAINED, REQUESTS, VOCABULARY, HIDDEN, RANK = 8, 8, 64, 32, 16
generator = torch.Generator().manual_seed(0)


@torch.no_grad()
def random_head() -> torch.nn.Module:
    """Without the part of the block's mean, so that a draft depends on itself and those before it only."""
    head = head_class(VOCABULARY, HIDDEN, TRAINED, rank=RANK, mlp_hidden=64, max_num_reqs=REQUESTS, topc=VOCABULARY)
    for _, parameter in sorted(head.named_parameters()):
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    head.down_g.weight.zero_()
    head.w2.weight.mul_(4)
    head.fold_from_raw_(torch.randn(RANK, TRAINED, TRAINED, generator=generator))
    head.build_fused_buffers()
    return head


head = random_head()
base = torch.randn(REQUESTS, TRAINED, VOCABULARY, generator=generator)
hidden = torch.randn(REQUESTS, TRAINED, HIDDEN, generator=generator)
anchors = torch.randint(0, VOCABULARY, (REQUESTS,), generator=generator)


@torch.no_grad()
def drafts(width: int) -> torch.Tensor:
    """Of blocks with so many positions, the first of which is the verified token: [requests, width - 1]."""
    parts = (base[:, :width].contiguous(), hidden[:, :width].contiguous())
    return head.jacobi_refine_greedy(*parts, anchors, anchors, TRAINED)


@torch.no_grad()
def one_by_one() -> torch.Tensor:
    """The drafts of the head's own definition in PyTorch, `refine_bias`, each from those before it."""
    previous = anchors[:, None].repeat(1, TRAINED)
    found = torch.empty(REQUESTS, TRAINED, dtype=torch.long)
    found[:, 0] = anchors
    for place in range(1, TRAINED):
        previous[:, 1:] = found[:, :-1].where(torch.arange(1, TRAINED) <= place, 0)
        logits = base + head.refine_bias(previous, head.hidden_cache(hidden))
        found[:, place] = logits[:, place].argmax(-1)
    return found[:, 1:]


wanted = one_by_one()
for width in (8, 6, 4):
    same = (drafts(width) == wanted[:, : width - 1]).float().mean().item()
    print(f"{width - 1} of {TRAINED - 1} drafts: {same:.0%} are those of the head")
    assert same == 1 if width == TRAINED else same < 0.7
PYTHON
TRITON_INTERPRET=1 "$folder/venv/bin/python" -W ignore "$folder/run.py" "$folder/files"
echo "ok: with fewer drafts than trained, the XPress refiner of vllm 0.33.0 computes other ones"
