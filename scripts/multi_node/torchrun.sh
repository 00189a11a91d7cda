#!/usr/bin/env bash
# A training script on several machines: the same command on each, with its own NODE_RANK.
#   NODES=2 NODE_RANK=0 HEAD=10.0.0.1:29500 GPUS=8 scripts/multi_node/torchrun.sh scripts/train_sd3.py --config config/grpo.py:pickscore_sd3
# docs/howto/several_machines.md says what the machines must share.
set -e
cd "$(dirname "$0")/../.."
torchrun --nnodes="${NODES:?number of machines}" --node_rank="${NODE_RANK:?number of this machine, from 0}" \
    --nproc_per_node="${GPUS:-8}" --rdzv_id="${RUN_ID:-flow_grpo}" --rdzv_backend=c10d --rdzv_endpoint="${HEAD:?host:port of machine 0}" "$@"
