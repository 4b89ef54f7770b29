ROOT=$(dirname "$0")
HERE=`pwd`
STAMP=$(date +%s)
SIZE=7b
NAME=llama-${SIZE}
FILE=${NAME##*/}
UPPER=${SIZE^^}
LONG=${#NAME}
python train.py --root $ROOT --data $HERE/data --stamp run-$STAMP --file $FILE --upper $UPPER --long $LONG \
  --name ${NAME} --replaced ${NAME/llama/gpt} --lr 1e-4 --home ~/x --glob data/* --brace {a,b} --random $RANDOM
