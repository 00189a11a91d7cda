#!/usr/bin/env bash
# Flow-GRPO on rendered text, Qwen-Image. Settings: those of pickscore_qwenimage; no code base publishes this run with a curve in numbers.
# Needs pip install 'flow_grpo[ocr]'; published prompts: data/ocr (docs/start/first_real_run.md) in the place of dataset/ocr.
set -e
cd "$(dirname "$0")/../.."
torchrun --standalone --nproc_per_node=8 scripts/train_qwenimage.py --config config/grpo.py:pickscore_qwenimage \
    --config.run_name=flow_grpo_ocr_qwenimage --config.dataset=dataset/ocr --config.reward_fn.pickscore=0 --config.reward_fn.ocr=1.0 \
    --config.sample.global_std=True --config.eval.num_prompts=128 \
    --config.num_epochs=250 --config.eval_freq=30 --config.save_freq=30 --config.resume_from=latest "$@"
