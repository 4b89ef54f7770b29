#!/bin/bash
BEFORE=1
source ./env.sh 2>/dev/null
AFTER=2
read -r FIRST SECOND <<< "3 4"
IFS=, read -ra ALL <<< "5,6"
printf -v PADDED "%03d" 7
declare -i SUM=1+2
declare -A MAP=([a]=1 [b]=2)
unset GONE
python train.py --before $BEFORE --after $AFTER --first $FIRST --padded $PADDED --sum $SUM --map ${MAP[a]} --all ${ALL[1]} --lr 3
