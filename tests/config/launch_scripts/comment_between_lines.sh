python train.py \
    --lr 1e-4 \
    --steps 100 \
    # --clip 1.0 \
    --seed 3
