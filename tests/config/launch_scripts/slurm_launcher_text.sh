#!/bin/bash
#SBATCH --nodes=2
GPUS_PER_NODE=8
NNODES=2
export LAUNCHER="python -u -m torch.distributed.run \
    --nproc_per_node $GPUS_PER_NODE \
    --nnodes $NNODES \
    --max_restarts 0 --tee 3 \
    "
OPTIMIZER_ARGS=" \
    --optimizer adam \
    --adam-eps 1e-8 \
    --lr 6e-5 \
    --clip-grad 1.0 \
    "
export CMD=" \
    pretrain_gpt.py \
    --pp-partition-method 'type:transformer|embedding' \
    $OPTIMIZER_ARGS \
    --partition-activations \
    "
echo $CMD
clear() { true; }
srun bash -c "$LAUNCHER $CMD" 2>&1 | tee -a main_log.txt
