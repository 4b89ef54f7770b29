#!/bin/bash
# Train on the machines that SLURM allocates. sbatch flags before the script's name override those below; flags after it
# go to `crosstrain train`, where a flag that is given again replaces the one here, and --options add to those here:
#
#     sbatch --nodes=4 FILE --options run.seed=1
#
# One task per machine starts a worker for each of its GPUs. Some minutes before the time limit the job saves, exits and
# is requeued. It is also requeued after the loss of a machine, and resumes from the newest checkpoint.
#
# In a container: CROSSTRAIN_SRUN_FLAGS, more flags of srun, or CROSSTRAIN_PYTHON, a command in place of python
# (docs/launching.md, SLURM). Made by:
#
#     crosstrain launch --to slurm --nodes 2 --cfg-path projects/gpt2_345m_8gpu.yaml
#
# Each GPU needs 7.07 GiB, and each machine 112 GiB, by `crosstrain plan`.

#SBATCH --job-name=gpt2-345m-8gpu
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
set -- --cfg-path projects/gpt2_345m_8gpu.yaml \
    --options run.max_restarts=20 \
    --nnodes "$SLURM_NNODES" --rdzv-endpoint "$first:$((20000 + SLURM_JOB_ID % 10000))" "$@"

# Each task's shell expands SLURM_NODEID; exec replaces the shell, so that the program receives the signals.
# CROSSTRAIN_SRUN_FLAGS and CROSSTRAIN_PYTHON are several words each.
# shellcheck disable=SC2016,SC2086
srun --kill-on-bad-exit=0 ${CROSSTRAIN_SRUN_FLAGS:-} \
    bash -c 'exec ${CROSSTRAIN_PYTHON:-python} -m crosstrain train --node-rank "$SLURM_NODEID" "$@"' bash "$@"
code=$?

case $code in
    138 | 143) scontrol requeue "$SLURM_JOB_ID" ;; # 128 + SIGUSR1 or SIGTERM: stopped after a save
esac
exit $code
