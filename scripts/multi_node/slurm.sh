#!/usr/bin/env bash
# A training script as a Slurm job of several machines, submitted from the checkout:
#   sbatch --nodes=2 scripts/multi_node/slurm.sh scripts/train_sd3.py --config config/grpo.py:pickscore_sd3
# Submitted from elsewhere, CHECKOUT names the checkout; paths in settings are those of where it was submitted.
# Five minutes before its time is over the job saves the run and requeues itself; a requeued job goes on from there.
# SWEEP=FILE sbatch --array=1-3 ... runs line 1, 2 and 3 of a file, each with settings of one run.
#SBATCH --job-name=flow_grpo
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm_%x_%j.log
set -e
CHECKOUT="${CHECKOUT:-$SLURM_SUBMIT_DIR}"
if [ -f "$CHECKOUT/.venv/bin/activate" ]; then
    source "$CHECKOUT/.venv/bin/activate"
fi
export PYTHONPATH="$CHECKOUT:$PYTHONPATH"
export NODES="$SLURM_NNODES" GPUS="${SLURM_GPUS_ON_NODE:-8}" RUN_ID="$SLURM_JOB_ID" SHUTDOWN_S=280
HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):${PORT:-29500}"
export HEAD

case "$1" in
    /*) SCRIPT="$1" ;;
    *) SCRIPT="$CHECKOUT/$1" ;;
esac
SETTINGS=(--config.resume_from=latest --config.signal_grace_s=270 "${@:2}")
if [ -n "$SWEEP" ]; then
    read -r -a LINE < <(sed -n "${SLURM_ARRAY_TASK_ID}p" "$SWEEP")
    SETTINGS+=("${LINE[@]}")
fi

# sbatch's --cpus-per-task is not that of srun's tasks unless they are told.
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-64}" --kill-on-bad-exit=1 \
    bash "$CHECKOUT/scripts/multi_node/torchrun.sh" "$SCRIPT" "${SETTINGS[@]}" &
STEP=$!
trap 'ASKED=1; kill -USR1 $STEP' USR1
# A signal ends a wait; the step itself ends once it has saved.
STATUS=0
wait $STEP || STATUS=$?
while kill -0 $STEP 2> /dev/null; do
    STATUS=0
    wait $STEP || STATUS=$?
done
if [ -n "$ASKED" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $STATUS
