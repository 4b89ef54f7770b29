SIZES=(64 128 256)
NAMES=("first one" second)
ALL=("${SIZES[@]}" 512)
NONE=()
SIZES[1]=100
python train.py --first ${SIZES[0]} --plain $SIZES --second ${SIZES[1]} --last ${SIZES[-1]} --all "${ALL[@]}" \
  --star "${ALL[*]}" --count ${#ALL[@]} --names "${NAMES[@]}" --split ${NAMES[0]} --none "${NONE[@]}" --lr 1e-4
