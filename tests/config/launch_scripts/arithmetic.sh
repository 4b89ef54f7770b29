NODES=4
GPUS=8
WORLD=$((NODES*GPUS))
MICRO=2
ACCUM=$(( 1024 / (WORLD * MICRO) ))
let "STEPS = 100 * 2"
TOKENS=$((300 * 1000 ** 3))
ITERS=$(( 300000000 / (1024 * 2048) ))
(( GPUS += 1 ))
HALF=$[10 / 4]
NEGATIVE=$(( (3 - 10) / 2 ))
REST=$(( 17 % 5 ))
python train.py --world $WORLD --accum $ACCUM --steps $STEPS --tokens $TOKENS --iters $ITERS --gpus $GPUS \
  --half $HALF --negative $NEGATIVE --rest $REST --shift $((1 << 4)) --octal $((010)) --lr 1e-4
