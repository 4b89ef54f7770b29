#!/bin/bash
ARGS="--lr 1e-4 --steps 10"
if [ "$DEBUG" = 1 ]; then
    python train.py $ARGS --batch 1
elif command -v deepspeed > /dev/null; then
    deepspeed train.py $ARGS --batch 8
else
    torchrun train.py $ARGS --batch 16
fi
