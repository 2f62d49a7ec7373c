#!/usr/bin/env bash
# What only a GPU can show: tests/gpu and the benchmarks. Needs a Python that imports torch and SGLang.
#   scripts/gpu.sh [FOLDER]    results go to FOLDER, by default benchmarks/results/<gpu>
set -euo pipefail
cd "$(dirname "$0")/.."
python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo "${PYTHON:-python3}")
gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name().lower().replace(" ", "-"))')
results=${1:-benchmarks/results/$gpu}
# Without the first, DeepGEMM compiles its kernels for every M up to 16,384 before it starts.
export SGLANG_JIT_DEEPGEMM_PRECOMPILE=0 HF_HUB_OFFLINE=1
"$python" -m pytest tests/gpu -q
"$python" -m sglang_fastpath.cli bench kernels --output "$results/kernels.json"
"$python" -m sglang_fastpath.cli bench denoiser --model qwen-image --output "$results/qwen-image.json"
"$python" -m sglang_fastpath.cli bench denoiser --model qwen-image --graph --output "$results/qwen-image-graph.json"
"$python" -m sglang_fastpath.cli bench denoiser --model flux2 --output "$results/flux2.json"
"$python" -m sglang_fastpath.cli bench denoiser --model flux2 --graph --output "$results/flux2-graph.json"
"$python" -m sglang_fastpath.cli bench tuner --output "$results/tuner.json" > /dev/null
"$python" scripts/soak_step_graph.py "$results/step-graph-soak.json"
