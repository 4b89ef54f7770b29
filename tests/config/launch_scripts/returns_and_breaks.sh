choose() {
    RATE=1
    if [ -n "x" ]; then RATE=2; return; fi
    RATE=3
}
SIZE=1
for x in a b; do
    if [ $x = a ]; then SIZE=2; break; fi
    SIZE=1
done
choose
python train.py --rate $RATE --size $SIZE --lr 1e-4
