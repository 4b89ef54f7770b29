#!/bin/bash
DATA_PATH="0.5 base"
for i in $(seq 1 3); do
    DATA_PATH="$DATA_PATH 0.1 part_$i"
done
PARTS=()
i=0
while [ $i -lt 2 ]; do
    PARTS+=("valid_$i")
    i=$((i + 1))
done
for ((j=0; j<2; j++)); do SEED=$j; done
python pretrain_gpt.py --data-path $DATA_PATH --valid-data-path "${PARTS[@]}" --seed $SEED --lr 1e-3 --train-iters 9
