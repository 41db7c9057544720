# usage: served.sh MODEL ROW ...    rows of targets.toml over HTTP, against one worker
model=$1; shift
for row in "$@"; do rows+=(--only "$row"); done
python3 -m benchmarks.targets --model "benchmarks/shapes/$model" "${rows[@]}" \
    --out "$LANE/served.jsonl" --commit "$COMMIT"
