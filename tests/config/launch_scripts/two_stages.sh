COMMON="--model gpt2 --batch 8"
python train.py $COMMON --lr 1e-3 --steps 100 --save stage1
python train.py $COMMON --lr 1e-4 --steps 100 --load stage1 --save stage2
