LR=1e-4
( cd /tmp && LR=5 )
echo 7 | read LR
{ WD=0.1; CLIP=1; }
export SEED=1 && BATCH=4 && cd . && \
time python train.py --lr $LR --wd $WD --clip $CLIP --seed $SEED --batch $BATCH &
wait
