PROMPT="a  long   text"
JSON='{"type": "linear", "factor": 2.0}'
LIST="a b c"
ONE='a b c'
NOTHING=""
python train.py --prompt "$PROMPT" --rope "$JSON" --list $LIST --one "$ONE" --escaped a\ b --dollar '$LR' \
  --mixed pre"fix "'of all'/end --none "$NOTHING" --next $NOTHING --flag --eq="x y" --q "it's" --tab "a	b" \
  --percent "50%" --hash a#b --url http://x/y?z=1 --pattern "*.txt" --bracket '[1,2]'
