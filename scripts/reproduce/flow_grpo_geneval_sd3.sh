#!/usr/bin/env bash
# Flow-GRPO on GenEval, SD3.5-medium (arXiv:2505.05470). Settings: geneval_sd3 of yifan123/flow_grpo, config/grpo.py.
# Needs data/geneval (docs/start/first_real_run.md) and a GenEval server on port 18085 (docs/howto/reward_servers.md).
# The published beta is 0.04, of a KL that is 4.39 times weaker: 0.04 / 4.39 = 0.0091 (docs/algorithms/flow_grpo.md).
set -e
cd "$(dirname "$0")/../.."
torchrun --standalone --nproc_per_node=8 scripts/train_sd3.py --config config/grpo.py:pickscore_sd3,large_gpu \
    --config.run_name=flow_grpo_geneval_sd3 --config.dataset=data/geneval --config.reward_fn.pickscore=0 --config.reward_fn.geneval=1.0 \
    --config.reward.args="{'geneval': {'url': 'http://127.0.0.1:18085', 'allow_pickle': True}}" \
    --config.train.beta=0.0091 --config.sample.global_std=True \
    --config.num_epochs=2500 --config.eval_freq=60 --config.save_freq=60 --config.resume_from=latest "$@"
