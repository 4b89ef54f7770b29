"""Configurations of other programs, written from the keys and values of their public examples."""

from __future__ import annotations

import json

_LAVIS_RUN = """
  task: {task}
  lr_sched: linear_warmup_cosine_lr
  init_lr: {lr}
  min_lr: {min_lr}
  weight_decay: 0.05
  num_workers: 4
  seed: 42
  evaluate: False
  train_splits: ["train"]
  device: cuda
  world_size: 1
  dist_url: "env://"
  distributed: True
"""


def _lavis(model: str, datasets: dict[str, tuple[str, str, int]], run: str, **values: object) -> str:
    entries = [
        f"""  {name}:
    vis_processor: {{train: {{name: {see}, image_size: {size}}}}}
    text_processor: {{train: {{name: {say}{", max_words: 100" if say == "base_instruction" else ""}}}}}
"""
        for name, (see, say, size) in datasets.items()
    ]
    return f"model: {model}\ndatasets:\n{''.join(entries)}run:{_LAVIS_RUN.format(**values)}{run}"


_CAPTIONS = {
    "coco_caption": ("blip2_image_train", "blip_caption", 224),
    "vg_caption": ("blip_image_train", "blip_caption", 224),
}
_INSTRUCTIONS = {
    name: ("blip2_image_train", "base_instruction", 224) for name in ("minigpt4_instruction", "llava_instruction")
}
_QWEN = """
  arch: minigpt4qwen
  model_type: qwen7b_chat
  load_finetuned: {load}
  load_pretrained: True
  pretrained: ckpt/blip2/blip2_pretrained_flant5xxl.pth
  finetuned: "{finetuned}"
  vit_model: eva_clip_g
  image_size: 224
  drop_path_rate: 0
  use_grad_checkpoint: True
  vit_precision: fp16
  freeze_vit: True
  unfreeze_pos_embed: False
  num_query_token: 32
  qformer_text_input: False
  freeze_qformer: True
  freeze_queries: True
  freeze_proj: False
  llm_model: ckpt/Qwen7B-chat
  get_lora: False
  lora_alpha: 32
  lora_r: 8
  lora_dropout: 0.05
  max_txt_len: {length}
"""
_DEEPSPEED = """
  deepspeed_config:
    gradient_accumulation_steps: {accum}
    train_micro_batch_size_per_gpu: 2
    gradient_clipping: 1.
    steps_per_print: 128
    wall_clock_breakdown: False
    dump_state: False
    fp16:
      {{enabled: False, loss_scale: 0, loss_scale_window: 1000, initial_scale_power: 16, hysteresis: 2}}
    bf16: {{enabled: True}}
    optimizer: {{type: AdamW, params: {{lr: {lr}, betas: [0.9, 0.99], eps: 1e-7, weight_decay: {decay}}}}}
    zero_optimization:
      stage: {stage}
      offload_optimizer: {{device: cpu, pin_memory: True}}
      allgather_partitions: True
      allgather_bucket_size: 2e8
      overlap_comm: True
      reduce_scatter: True
      reduce_bucket_size: 2e8
      contiguous_gradients: True
"""

GPT3_SCRIPT = r"""#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=16
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=$1 #<Specify path>
VOCAB_FILE=$2 # gpt2-vocab.json
MERGE_FILE=$3
DATA_PATH=$4 # a prefix (_text_document)
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES)
MODEL=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # or (flash/fused/unfused/local)
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375
    --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine
    --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
)
PARALLEL=(--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16)
DATA=(--data-path $DATA_PATH --vocab-file $VOCAB_FILE --merge-file $MERGE_FILE --split 949,50,1)
LOGGING=(
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10
    --save $CHECKPOINT_PATH --load $CHECKPOINT_PATH --tensorboard-dir $CHECKPOINT_PATH/tensorboard
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${MODEL[@]} ${TRAINING[@]} ${PARALLEL[@]} \
    ${DATA[@]} ${LOGGING[@]}
"""

GPT2_COMMAND = r"""
DATA_PATH=${DATA_PATH:-data/webtext}
python pretrain_gpt.py \
       --num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
       --micro-batch-size 4 --global-batch-size 8 --seq-length 1024 --max-position-embeddings 1024 \
       --train-iters 500000 --lr-decay-iters 320000 \
       --save checkpoints/gpt2 --load checkpoints/gpt2 --data-path $DATA_PATH \
       --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --data-impl mmap --split 949,50,1 \
       --distributed-backend nccl --lr 0.00015 --min-lr 1.0e-5 --lr-decay-style cosine --weight-decay 1e-2 \
       --clip-grad 1.0 --lr-warmup-fraction .01 --checkpoint-activations \
       --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --fp16
"""

LLAMA_SCRIPT = r"""#!/bin/bash
CHECKPOINT_PATH=${1:-"checkpoints/llama3_8b"}
TOKENIZER_ARG=${3:-"MOCK"} # a path, or "MOCK"
TP_SIZE=2
SEQ_LENGTH=8192
DATA_CACHE_PATH="${PWD}/cache"
mkdir -p "$(dirname "$CHECKPOINT_PATH")"
MODEL_ARGS=(
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length $SEQ_LENGTH
    --max-position-embeddings $SEQ_LENGTH --position-embedding-type rope --rotary-base 1000000
    --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --normalization RMSNorm
    --untie-embeddings-and-output-weights --disable-bias-linear
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
    --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --lr-decay-style cosine
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16
    --cross-entropy-loss-fusion --manual-gc --exit-duration-in-mins 235
)
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=("--fp8-format hybrid" "--fp8-param-gather")
fi
DDP_ARGS=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
TRAINING_ARGS+=("${DDP_ARGS[@]}")
DATA_ARGS=(
    "--data-path data/a_text_document"
    "--tokenizer-type HuggingFaceTokenizer"
    "--tokenizer-model meta-llama/Meta-Llama-3-8B"
    "--data-cache-path ${DATA_CACHE_PATH}"
    "--split '99,1,0'"
    "--vocab-size 128256"
    "--num-workers 1"
)
if [ ! -f "$SCRIPT" ]; then
    echo "Error: pretrain_gpt.py not found"
fi
torchrun --nproc_per_node 8 pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} ${DTYPE_ARGS[@]} \
    --tensor-model-parallel-size $TP_SIZE --context-parallel-size 1 --sequence-parallel ${DATA_ARGS[@]} \
    --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput \
    --ckpt-format torch_dist --distributed-timeout-minutes 60 --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH" $@
"""

# name -> (program, name of the file, its text)
FOREIGN = {
    "lavis_stage1": ("lavis", "pretrain_stage1.yaml", _lavis(
        "{arch: blip2, model_type: pretrain, load_pretrained: False, freeze_vit: True}", _CAPTIONS,
        "  warmup_lr: 1e-6\n  warmup_steps: 5000\n  max_epoch: 10\n  batch_size_train: 100\n  batch_size_eval: 64\n"
        "  output_dir: output/BLIP2/Pretrain_stage1\n  amp: True\n  resume_ckpt_path: null\n",
        task="image_text_pretrain", lr=1e-4, min_lr=1e-5,
    )),
    "lavis_stage2": ("lavis", "pretrain_stage2.yaml", _lavis(
        "{arch: blip2_opt, model_type: pretrain_opt2.7b, load_pretrained: True, pretrained: blip2_pretrained.pth, "
        "freeze_vit: True}", _CAPTIONS,
        "  warmup_lr: 1e-6\n  warmup_steps: 2000\n  max_epoch: 10\n  batch_size_train: 64\n  batch_size_eval: 64\n"
        "  output_dir: output/BLIP2/Pretrain_stage2\n  amp: True\n  resume_ckpt_path: null\n",
        task="image_text_pretrain", lr=1e-4, min_lr=1e-5,
    )),
    "lavis_caption": ("lavis", "caption_coco_ft.yaml", _lavis(
        "{arch: blip2_opt, model_type: caption_coco_opt2.7b, load_finetuned: False, use_grad_checkpoint: True}",
        {"coco_caption": ("blip_image_train", "'blip_caption', prompt: 'a photo of '", 364)},
        "  warmup_lr: 1e-8\n  warmup_steps: 1000\n  max_epoch: 5\n  batch_size_train: 16\n  batch_size_eval: 16\n"
        "  max_len: 30\n  min_len: 8\n  num_beams: 5\n  output_dir: output/BLIP2/Caption_coco\n  amp: True\n"
        "  valid_splits: [val]\n  test_splits: [test]\n", task="captioning", lr=1e-5, min_lr=0,
    )),
    "lavis_vqa": ("lavis", "vqav2_ft.yaml", _lavis(
        "{arch: blip_vqa, model_type: vqav2, load_finetuned: False, image_size: 480}",
        {name: ("blip_image_train", "blip_question", 480) for name in ("coco_vqa", "vg_vqa")},
        "  max_epoch: 10\n  batch_size_train: 16\n  batch_size_eval: 64\n  max_len: 10\n  min_len: 1\n  num_beams: 3\n"
        "  num_ans_candidates: 128\n  inference_method: rank\n  output_dir: output/BLIP/VQA\n  test_splits: [test]\n",
        task="vqa", lr=2e-5, min_lr=0,
    )),
    "minigpt4qwen": ("minigpt4qwen", "train.yaml", _lavis(
        _QWEN.format(load=False, finetuned="", length=256) + "  autocast_dtype: bfloat16\n", _INSTRUCTIONS,
        "  warmup_lr: 0\n  warmup_steps: 500\n  grad_norm_clip: 1.\n  max_epoch: 5\n  batch_size_train: 1\n"
        "  batch_size_eval: 1\n  accum_grad_iters: 16\n  max_new_tokens: 100\n  min_new_tokens: 1\n  num_beams: 5\n"
        "  output_dir: output/instruction_tuning\n  amp: False\n  resume_ckpt_path: null\n  fsdp: False\n",
        task="image_text_pretrain", lr=1e-4, min_lr=1e-6,
    )),
    "minigpt4qwen_zero2": ("lavis", "train_zero2_3090x4.yaml", _lavis(
        _QWEN.format(load=False, finetuned="", length=256) + "  enable_autocast: False\n", _INSTRUCTIONS,
        "  runner: deepspeed_runner\n  warmup_lr: 0\n  warmup_steps: 500\n  max_epoch: 10\n  batch_size_train: 2\n"
        "  batch_size_eval: 1\n  log_freq: 32\n  resume_ckpt_load_dir: null\n  resume_ckpt_tag: null\n"
        "  output_dir: output/deepspeed/zero2\n" + _DEEPSPEED.format(accum=16, lr=1e-4, decay=0.05, stage=2),
        task="deepspeed_image_text_pretrain", lr=1e-4, min_lr=1e-6,
    )),
    "minigpt4qwen_sft": ("mpp-llava", "sft.yaml", _lavis(
        _QWEN.format(load=True, finetuned="output/pretrain/model.pth", length=1536) + "  freeze_llm: False\n",
        {name: ("blip2_image_train", "base_instruction", 224) for name in ("llava_instruct_156k", "videochatgpt_100k")},
        "  max_epoch: 1\n  log_freq: 10\n  warmup_lr: 0\n  warmup_ratio: 0.1\n  output_dir: output/sft_video\n"
        + _DEEPSPEED.format(accum=32, lr=2e-5, decay=0.0, stage=1),
        task="deepspeed_image_text_pretrain", lr=2e-5, min_lr=0,
    )),
    "megatron_gpt3": ("megatron-lm", "train_gpt3_175b_distributed.sh", GPT3_SCRIPT),
    "megatron_gpt2": ("megatron_lm", "pretrain_gpt.sh", GPT2_COMMAND),
    "megatron_llama3": ("megatron", "train_llama3_8b.sh", LLAMA_SCRIPT),
    "trainer": ("transformers", "arguments.json", json.dumps({
        "output_dir": "out", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "learning_rate": 2e-5,
        "num_train_epochs": 3.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.03, "weight_decay": 0.0, "bf16": True,
        "gradient_checkpointing": True, "logging_steps": 10, "save_strategy": "steps", "save_steps": 200, "seed": 42,
        "save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 100, "report_to": ["wandb"], "tf32": True,
        "optim": "adamw_torch_fused", "adam_beta2": 0.95, "max_grad_norm": 1.0, "ddp_timeout": 1800,
        "deepspeed": "ds_z3.json", "dataloader_num_workers": 2, "push_to_hub": False, "remove_unused_columns": True,
    })),
    "trl_sft": ("trl", "sft.sh", r"""
accelerate launch trl/scripts/sft.py \
    --model_name_or_path Qwen/Qwen2-0.5B --dataset_name trl-lib/Capybara --learning_rate 2.0e-4 \
    --num_train_epochs 1 --packing --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \
    --gradient_checkpointing --logging_steps 25 --eval_strategy steps --eval_steps 100 \
    --use_peft --lora_r 32 --lora_alpha 16 --output_dir Qwen2-0.5B-SFT --push_to_hub
"""),
    "deepspeed_zero3": ("deepspeed", "ds_z3.json", json.dumps({
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True, "steps_per_print": 100, "wall_clock_breakdown": False,
        "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "initial_scale_power": 16, "hysteresis": 2,
                 "min_loss_scale": 1},
        "bf16": {"enabled": False},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4,
                      "warmup_num_steps": 100, "total_num_steps": 2000, "warmup_type": "linear"}},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
                              "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": 5e8,
                              "stage3_param_persistence_threshold": 1e6, "stage3_max_live_parameters": 1e9,
                              "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True},
    })),
    "nanogpt": ("nanogpt", "train_gpt2.py", """
wandb_log = True
wandb_project = 'owt'
wandb_run_name = 'gpt2-124M'
# 12 batch size * 1024 block size * 5 gradaccum * 8 GPUs
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8
max_iters = 600000
lr_decay_iters = max_iters
eval_interval = 1000
eval_iters = 200
log_interval = 10
weight_decay = 1e-1
out_dir = __import__('os').getenv('HOME')
"""),
    "torchtitan": ("torchtitan", "llama3_8b.toml", """
[job]
dump_folder = "./outputs"
description = "Llama 3 8B training"
[profiling]
enable_profiling = true
save_traces_folder = "profile_trace"
profile_freq = 100
[metrics]
log_freq = 10
enable_tensorboard = true
save_tb_folder = "tb"
[model]
name = "llama3"
flavor = "8B"
tokenizer_path = "./assets/tokenizer/original/tokenizer.model"
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
compile = false
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
context_parallel_degree = 1
[checkpoint]
enable_checkpoint = true
folder = "checkpoint"
interval = 500
model_weights_only = false
export_dtype = "float32"
async_mode = "disabled"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[float8]
enable_fsdp_float8_all_gather = false
filter_fqns = "output"
"""),
    "llama_factory": ("llama-factory", "llama3_lora_sft.yaml", """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
dataloader_num_workers: 4
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 500
"""),
}  # fmt: skip
