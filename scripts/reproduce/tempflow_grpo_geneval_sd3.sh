#!/usr/bin/env bash
# TempFlow-GRPO on GenEval, SD3.5-medium (arXiv:2508.04324). Settings: geneval_sd3_pr of Shredded-Pork/TempFlow-GRPO, config/dgx.py.
# Needs data/geneval (docs/start/first_real_run.md) and a GenEval server on port 18085 (docs/howto/reward_servers.md).
set -e
cd "$(dirname "$0")/../.."
torchrun --standalone --nproc_per_node=8 scripts/train_sd3_pr.py --config config/grpo.py:pickscore_sd3_pr,large_gpu \
    --config.run_name=tempflow_grpo_geneval_sd3 --config.dataset=data/geneval --config.reward_fn.pickscore=0 --config.reward_fn.geneval=1.0 \
    --config.reward.args="{'geneval': {'url': 'http://127.0.0.1:18085', 'allow_pickle': True}}" --config.train.beta=0.004 \
    --config.train.step_weight=mean_one --config.num_epochs=3000 --config.eval_freq=20 --config.save_freq=100 --config.resume_from=latest "$@"
