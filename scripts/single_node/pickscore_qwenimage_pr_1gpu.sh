#!/usr/bin/env bash
# Qwen-Image on PickScore, 1 GPU; needs --config.dataset=FOLDER with train.txt and test.txt.
set -e
ROOT="$(dirname "$0")/../.."
torchrun --standalone --nproc_per_node=1 "$ROOT/scripts/train_qwenimage_pr.py" --config config/grpo.py:pickscore_qwenimage_pr "$@"
