for lr in 1e-4 3e-4; do
  for wd in 0 0.1
  do
    python sweep.py --lr $lr --wd=$wd --steps 10 --out runs/$lr-$wd
  done
done
