#! /bin/bash
N_NODES=2
DIST="--nproc_per_node 8 \
      --nnodes $N_NODES \
      --node_rank 0"
GPT_ARGS="--num-layers 12 --hidden-size 768 \
  --num-attention-heads 12 \
  --micro-batch-size 4   --global-batch-size 64
  --lr 0.00015 --weight-decay 1e-2"
OUTPUT_ARGS="
    --log-interval 10
    --save-interval 500
"
python -m torch.distributed.launch $DIST \
       pretrain_gpt.py \
       $GPT_ARGS \
       $OUTPUT_ARGS \
       --fp16 \
       --DDP-impl local 2>&1 | tee train.log
