#!/bin/bash
# Train on the machines that SLURM allocates. sbatch flags before the script name override those below; flags after it
# go to train.py:
#
#     sbatch --nodes=4 deploy/slurm.sh --cfg-path projects/gpt2_345m.yaml
#
# One task per machine starts a worker for each of its GPUs. Five minutes before the time limit the job saves, exits and
# is requeued. It is also requeued after the loss of a machine, and resumes from the newest checkpoint.
#
# In a container: CROSSTRAIN_SRUN_FLAGS, more flags of srun, or CROSSTRAIN_PYTHON, a command in place of python
# (docs/launching.md, SLURM).

#SBATCH --job-name=crosstrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -u
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
endpoint=$first:$((20000 + SLURM_JOB_ID % 10000))

# Each task's shell expands SLURM_NODEID; exec replaces the shell, so that train.py receives the signals.
# CROSSTRAIN_SRUN_FLAGS and CROSSTRAIN_PYTHON are several words each.
# shellcheck disable=SC2016,SC2086
srun --kill-on-bad-exit=0 ${CROSSTRAIN_SRUN_FLAGS:-} \
    bash -c 'exec ${CROSSTRAIN_PYTHON:-python} train.py --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" "$@"' \
    bash --rdzv-endpoint "$endpoint" "$@"
code=$?

case $code in
    138 | 143) scontrol requeue "$SLURM_JOB_ID" ;; # 128 + SIGUSR1 or SIGTERM: stopped after a save
esac
exit $code
