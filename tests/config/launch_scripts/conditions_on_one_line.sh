BATCH=8
if [ $BATCH -eq 8 ]; then LR=6e-4; else LR=1e-3; fi
[ -n "$RESUME" ] && EXTRA="--resume last"
[[ "$FLASH" == 1 ]] || ATTENTION=eager
WD=0.1; CLIP=1.0;
python train.py --init_lr $LR --weight_decay $WD --clip $CLIP --attention ${ATTENTION} $EXTRA --seed 1;
