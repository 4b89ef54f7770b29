#!/bin/bash
#SBATCH --job-name=pretrain
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --lr=3
#SBATCH --output=%x-%j.out
set -x -e
module load cuda
source $HOME/.bashrc || true
nodes=( $( scontrol show hostnames $SLURM_JOB_NODELIST ) )
head_node=${nodes[0]}
export MASTER_ADDR=$(srun --nodes=1 --ntasks=1 -w "$head_node" hostname --ip-address)
export MASTER_PORT=6000
export LR=2e-4
srun --nodes=4 torchrun \
    --nnodes 4 \
    --nproc_per_node 8 \
    --rdzv_id $RANDOM \
    --rdzv_endpoint $MASTER_ADDR:29500 \
    train.py --lr $LR --global-batch-size 1024 \
    --job $SLURM_JOB_ID
