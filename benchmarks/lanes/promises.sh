# usage: promises.sh    1P + 1D of Llama-8B that promises times for first and next tokens
pair() {
    local name=$1; shift
    python3 -m benchmarks.targets --split auto --out "$LANE/pairs.jsonl" --commit "$COMMIT" "$@"
    bash "$(dirname "$0")/logs.sh" "$name"
}
pair promise-64 --slo none 7.2 --only pair-64
pair promise-15 --slo 150 6.5 --only pair-15 --only pair-10
