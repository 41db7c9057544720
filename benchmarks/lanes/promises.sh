# usage: promises.sh    1P + 1D of Llama-8B that promises times for first and next tokens
pair() {
    python3 -m benchmarks.targets --split auto --out "$LANE/pairs.jsonl" --commit "$COMMIT" "$@"
}
pair --slo none 7.2 --only pair-64
pair --slo 150 6.5 --only pair-15 --only pair-10
