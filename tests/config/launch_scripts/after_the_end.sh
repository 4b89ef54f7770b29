LR=1e-4
python train.py --lr $LR --steps 7
exit 0
python train.py --lr 5 --steps 8 --more 1 --and more
