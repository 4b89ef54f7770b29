#!/bin/bash
MOE=true
FP8=false
ARGS=(--lr 1e-4 --bf16)
if [ "$MOE" = true ]; then
    ARGS+=(--num-experts 8 --moe-router-topk 2)
fi
if $FP8; then
    EXTRA=(--fp8-format hybrid)
fi
SP=""
[ 2 -gt 1 ] && SP="--sequence-parallel"
PIPE=1
if [ $PIPE -gt 1 ]; then ARGS+=(--lr 9); fi
torchrun train.py "${ARGS[@]}" "${EXTRA[@]}" $SP --steps 5 --clip 1.0
