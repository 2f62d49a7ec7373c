#!/usr/bin/env bash
# The main job on a machine without a GPU: a small Qwen-Image in block FP8 through SGLang's whole engine, stock and
# with the plugin, images compared as bytes. Leaves everything in .demo/.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/install.sh
bf16=.demo/tiny-qwen-image fp8=.demo/tiny-qwen-image-fp8
mkdir -p .demo
if [ ! -e "$bf16/model_index.json" ]; then
  echo "== Making a small Qwen-Image checkpoint with random weights in $bf16"
  .venv/bin/python scripts/make_tiny_checkpoint.py "$bf16" --model qwen-image
fi
if [ ! -e "$fp8/model_index.json" ]; then
  echo "== Quantizing it to block FP8 in $fp8"
  .venv/bin/sglang-fastpath quantize "$bf16" "$fp8"
fi
emulate=()
.venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
  echo "== No GPU here: the FP8 linear's arithmetic is emulated in torch, in stock and plugin runs alike (--emulate)"
  emulate=(--emulate)
}
echo "== Generating with SGLang's engine: stock, with --plugin fastpath, and with each feature off"
.venv/bin/sglang-fastpath ablate --model-path "$fp8" --model-id Qwen-Image --output .demo/ablation \
  --width 64 --height 64 --steps 3 "${emulate[@]}"
