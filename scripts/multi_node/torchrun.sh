#!/usr/bin/env bash
# A training script on several machines: the same command on each.
#   NODES=2 HEAD=10.0.0.1:29500 GPUS=8 scripts/multi_node/torchrun.sh scripts/train_sd3.py --config config/grpo.py:pickscore_sd3
# docs/howto/several_machines.md says what the machines must share. The run's ranks get SIGUSR1, too, which Slurm sends
# before a job's time is over, and as long as the run may take to end; see config.signal_grace_s.
set -e
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${SHUTDOWN_S:-30}"
exec torchrun --nnodes="${NODES:?number of machines}" --nproc_per_node="${GPUS:-8}" \
    --rdzv_id="${RUN_ID:-flow_grpo}" --rdzv_backend=c10d --rdzv_endpoint="${HEAD:?host:port of one machine}" \
    --signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 "$@"
