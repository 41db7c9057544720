# usage: pairs.sh    all rows of 1P + 1D of Llama-8B, without promises
python3 -m benchmarks.targets --only pair --split auto --out "$LANE/pairs.jsonl" --commit "$COMMIT"
bash "$(dirname "$0")/logs.sh" pairs
