#!/bin/bash
: ${SEED:=1234}
: "${WORKERS:=4}"
LR=${LR:-2e-5}
NAME=${1:-"my run"}
OUT=${OUT-unset_only}
MAYBE=${DEBUG:+--debug}
EMPTY=
GPUS=${GPUS:-$(nvidia-smi -L | wc -l)}
python train.py --seed $SEED --workers "$WORKERS" --lr $LR --name "$NAME" --empty "${EMPTY:-filled}" \
    --length ${LENGTH:-1024} --out $OUT --gpus ${GPUS} $MAYBE ${@:2}
