#!/usr/bin/env bash
# A training script as a Slurm job of several machines:
#   sbatch --nodes=2 scripts/multi_node/slurm.sh scripts/train_sd3.py --config config/grpo.py:pickscore_sd3 --config.resume_from=latest
# A job that is requeued goes on from its newest checkpoint. Submit it from the repository root.
#SBATCH --job-name=flow_grpo
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --output=runs/slurm_%j.log
set -e
export NODES="$SLURM_NNODES" GPUS="${SLURM_GPUS_ON_NODE:-8}" RUN_ID="$SLURM_JOB_ID"
HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):29500"
export HEAD
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID scripts/multi_node/torchrun.sh "$@"' bash "$@"
