#!/usr/bin/env bash
# DiffusionNFT on GenEval, SD3.5-medium, without guidance (arXiv:2509.16117). Settings: sd3_geneval of NVlabs/DiffusionNFT.
# Needs data/geneval (docs/start/first_real_run.md) and a GenEval server on port 18085 (docs/howto/reward_servers.md).
set -e
cd "$(dirname "$0")/../.."
torchrun --standalone --nproc_per_node=8 scripts/train_sd3_nft.py --config config/nft.py:pickscore_sd3_nft,large_gpu \
    --config.run_name=diffusion_nft_geneval_sd3 --config.dataset=data/geneval --config.reward_fn.pickscore=0 --config.reward_fn.geneval=1.0 \
    --config.reward.args="{'geneval': {'url': 'http://127.0.0.1:18085', 'allow_pickle': True}}" --config.train.updates_per_epoch=1 \
    --config.num_epochs=1000 --config.eval_freq=30 --config.save_freq=30 --config.resume_from=latest "$@"
