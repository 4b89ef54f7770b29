#!/bin/bash
# Pretraining on one node, with one array for each kind of setting.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=1
MASTER_ADDR=localhost
MASTER_PORT=6000
NODE_RANK=0
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))

CHECKPOINT_PATH=$1 # a folder
VOCAB_FILE=$2
DATA_PATH=$3

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr $MASTER_ADDR
    --master_port $MASTER_PORT
)
SIZES=(
    --num-layers 24
    --hidden-size 2048   # of 16 heads
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # or flash
)
TRAINING=(
    --micro-batch-size 2
    --global-batch-size $((WORLD_SIZE * 2 * 4))
    --train-iters 500000
    --adam-beta1 0.9
    --adam-beta2 0.95
    --lr 6.0e-5
    --lr-warmup-fraction .001
    --fp16
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${SIZES[@]} \
    ${TRAINING[@]} \
    --data-path $DATA_PATH --vocab-file "$VOCAB_FILE" --split 949,50,1 \
    --save "$CHECKPOINT_PATH"
