#!/usr/bin/env bash
# SD3.5-medium on PickScore: 4 GPUs train, a fifth scores while they sample; needs --config.dataset=FOLDER with train.txt and test.txt.
set -e
cd "$(dirname "$0")/../.."
torchrun --standalone --nproc_per_node=4 scripts/train_sd3.py --config config/grpo.py:pickscore_sd3 \
    --config.reward.backend=process --config.reward.device=cuda:4 "$@"
