#!/usr/bin/env bash
# Flow-GRPO on rendered text, SD3.5-medium (arXiv:2505.05470). Settings: general_ocr_sd3 of yifan123/flow_grpo, config/grpo.py.
# Needs pip install 'flow_grpo[ocr]'; published prompts: data/ocr (docs/start/first_real_run.md) in the place of dataset/ocr.
# The published beta is 0.04, of a KL that is 4.39 times weaker: 0.04 / 4.39 = 0.0091 (docs/algorithms/flow_grpo.md).
set -e
cd "$(dirname "$0")/../.."
torchrun --standalone --nproc_per_node=8 scripts/train_sd3.py --config config/grpo.py:pickscore_sd3,large_gpu \
    --config.run_name=flow_grpo_ocr_sd3 --config.dataset=dataset/ocr --config.reward_fn.pickscore=0 --config.reward_fn.ocr=1.0 \
    --config.train.beta=0.0091 --config.sample.global_std=True \
    --config.num_epochs=1000 --config.eval_freq=60 --config.save_freq=60 --config.resume_from=latest "$@"
