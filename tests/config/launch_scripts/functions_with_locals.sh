#!/bin/bash
LR=3e-4
log() {
    local LR=9
    echo "[$(date)] $* --lr 7"
}
sizes() {
    HIDDEN=1024
    LAYERS=24
}
train() {
    local name=$1
    shift
    log "starting $name"
    torchrun --nproc_per_node 4 train.py --name "$name" --lr $LR --hidden $HIDDEN --layers ${LAYERS} "$@"
}
sizes
log ready
train first --seed 5 --bf16
