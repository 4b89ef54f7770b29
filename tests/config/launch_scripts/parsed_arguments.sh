#!/bin/bash
LR=1e-4
NAME=default
while [[ $# -gt 0 ]]; do
    case "$1" in
        --lr) LR="$2"; shift 2 ;;
        --name) NAME=$2; shift; shift ;;
        *) shift ;;
    esac
done
while getopts "b:" option; do
    case $option in b) BATCH=$OPTARG ;; esac
done
python train.py --lr $LR --name $NAME --batch ${BATCH:-4} --steps 3
