#!/bin/bash
set -o pipefail
NCCL_P2P_LEVEL=NVL OMP_NUM_THREADS=1 \
python -m torch.distributed.run --nproc_per_node=2 \
    /opt/nemo/megatron_gpt_pretraining.py \
    --config-path=/conf --config-name=gpt \
    trainer.devices=2 \
    ++model.micro_batch_size=4 \
    'model.data.data_prefix=[1.0,data/a]' \
    model.optim.lr=1e-4 exp_manager.name="my run"
