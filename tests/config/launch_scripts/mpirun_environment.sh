#!/bin/bash
export NCCL_DEBUG=WARN
HOSTS=a:8,b:8
mpirun -np 16 -H $HOSTS --bind-to none -map-by slot \
    -x NCCL_DEBUG -x PATH -mca pml ob1 \
    python -u pretrain_bert.py --micro-batch-size 4 --lr 0.0001 --data-path "0.3 a 0.7 b" --mask-prob .15
