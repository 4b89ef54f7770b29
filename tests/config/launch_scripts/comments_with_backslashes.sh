# The rate of the paper: \
LR=6e-4
# LR=1e-3 \
#   was too large \
STEPS=100 # or 200 \
python train.py \
    --lr $LR \
    --steps $STEPS \
    --warmup 10   # in steps \
set +x
