#!/usr/bin/env bash
# Flow-GRPO on PickScore, Qwen-Image. Settings: pickscore_qwenimage_8gpu of yifan123/flow_grpo, config/grpo.py.
# Needs data/pickscore_sfw (docs/start/first_real_run.md).
set -e
cd "$(dirname "$0")/../.."
torchrun --standalone --nproc_per_node=8 scripts/train_qwenimage.py --config config/grpo.py:pickscore_qwenimage \
    --config.run_name=flow_grpo_pickscore_qwenimage --config.dataset=data/pickscore_sfw \
    --config.sample.global_std=True --config.eval.num_prompts=128 \
    --config.num_epochs=250 --config.eval_freq=30 --config.save_freq=30 --config.resume_from=latest "$@"
