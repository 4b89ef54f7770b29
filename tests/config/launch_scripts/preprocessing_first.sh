#!/bin/bash
INPUT=data/raw.jsonl
PREFIX=data/tokens
python tools/preprocess_data.py \
    --input $INPUT \
    --output-prefix $PREFIX \
    --workers 8 \
    --append-eod
torchrun --nproc_per_node 2 pretrain_gpt.py --data-path ${PREFIX}_text_document \
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 \
    --lr 1e-3 --train-iters 10 --micro-batch-size 2
python tools/convert.py --load out --save hf
