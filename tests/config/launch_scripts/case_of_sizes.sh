#!/bin/bash
MODEL_SIZE=${MODEL_SIZE:-7b}
case $MODEL_SIZE in
    7b)
        HIDDEN=4096; LAYERS=32 ;;
    13b|14b)
        HIDDEN=5120
        LAYERS=40
        ;;
    *)
        echo "unknown size"
        exit 1
        ;;
esac
torchrun --nproc-per-node=8 pretrain.py --hidden-size $HIDDEN --num-layers $LAYERS \
    --num-attention-heads 32 --swiglu --lr 1.5e-4
