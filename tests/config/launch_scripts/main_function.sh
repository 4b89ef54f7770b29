#!/usr/bin/env bash
set -euo pipefail
die() { echo "error: $1" >&2; exit 1; }
main() {
    MODEL=gpt2
    ARGS=(--model "$MODEL" --lr 5e-5)
    ARGS+=(--epochs 3 "--output_dir=out/$MODEL")
    [[ -d . ]] || die "no folder"
    accelerate launch --num_processes 2 run_clm.py "${ARGS[@]}" --text 'two words'
}
main "$@" 2>&1 | tee run.log
