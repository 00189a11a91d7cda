#!/usr/bin/env bash
# TempFlow-GRPO on PickScore, Qwen-Image (arXiv:2508.04324). Settings: pickscore_qwenimage_pr of Shredded-Pork/TempFlow-GRPO, config/dgx.py.
# Needs data/pickscore_sfw (docs/start/first_real_run.md).
set -e
cd "$(dirname "$0")/../.."
torchrun --standalone --nproc_per_node=8 scripts/train_qwenimage_pr.py --config config/grpo.py:pickscore_qwenimage_pr \
    --config.run_name=tempflow_grpo_pickscore_qwenimage --config.dataset=data/pickscore_sfw --config.eval.num_prompts=128 \
    --config.train.step_weight=mean_one --config.num_epochs=250 --config.eval_freq=20 --config.save_freq=20 --config.resume_from=latest "$@"
