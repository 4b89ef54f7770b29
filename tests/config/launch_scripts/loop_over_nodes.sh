#!/bin/bash
NODES="n1 n2"
LR=1e-4
rank=0
for node in $NODES; do
    echo "starting $node"
    torchrun --nnodes 2 --node_rank $rank train.py --lr $LR --steps 50 --tag run-$node
    rank=$((rank+1))
done
