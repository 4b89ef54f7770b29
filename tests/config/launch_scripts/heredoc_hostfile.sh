#!/bin/bash
TP=2
ZERO_STAGE=2
cat <<EOF > hostfile
worker-1 slots=8 --lr 9
worker-2 slots=8
EOF
cat > ds_config.json <<EOT
{
  "train_batch_size": 256,
  "zero_optimization": { "stage": $ZERO_STAGE },
  "fp16": { "enabled": true }
}
EOT
ds_args=""
ds_args="--deepspeed ${ds_args}"
ds_args=" --deepspeed_config=ds_config.json ${ds_args}"
ds_args=" --zero-stage=$ZERO_STAGE ${ds_args}"
deepspeed --hostfile=hostfile --num_nodes 2 pretrain_gpt.py \
    --tensor-model-parallel-size $TP \
    --lr 3e-4 --bf16 \
    $ds_args
