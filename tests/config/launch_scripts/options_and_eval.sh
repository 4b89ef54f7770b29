#!/bin/bash
DIR=`pwd`
SEQ_LEN=2048
NUM_LAYERS=24
LR=2.0e-4
MIN_LR=2e-06
TRAIN_TOKENS=300000000000
NUM_GPUS=64
EP_SIZE=128
if [[ $EP_SIZE -gt $NUM_GPUS ]]; then
    EP_PARALLEL_SIZE=$NUM_GPUS
else
    EP_PARALLEL_SIZE=$EP_SIZE
fi
MLC=0.01
ACTIVATION_CHECKPOINT="true"
current_time=$(date "+%Y.%m.%d-%H.%M.%S")
host="${HOSTNAME}"
NAME="gpt-lr-${LR}-min-${MIN_LR}-gpus-${NUM_GPUS}"
mkdir -p logs
data_options=" \
         --vocab-file ${DIR}/vocab.json \
         --data-path data/pile \
         --data-impl mmap"
megatron_options=" \
        --override-opt_param-scheduler \
        --adam-beta1 0.9 \
        --num-layers ${NUM_LAYERS} \
        --seq-length ${SEQ_LEN} \
        --moe-expert-parallel-size ${EP_PARALLEL_SIZE} \
        --moe-loss-coeff ${MLC} \
        --train-tokens ${TRAIN_TOKENS} \
        --lr ${LR} \
        --min-lr ${MIN_LR} \
        --split 98,2,0 \
        --fp16"
if [ "${ACTIVATION_CHECKPOINT}" = "true" ]; then
megatron_options="${megatron_options} \
        --checkpoint-activations"
fi
sed "s/BATCH/8/" template.json 2> /dev/null > config.json
deepspeed_options=" \
    --deepspeed \
    --deepspeed_config config.json \
    --zero-stage 1"
run_cmd="deepspeed pretrain_gpt.py ${megatron_options} ${data_options} ${deepspeed_options} &> logs/${NAME}.log"
echo ${run_cmd}
eval ${run_cmd}
set +x
