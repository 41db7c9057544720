# usage: sums.sh RANKS [NAME=VALUE] ...    benchmarks.engine.sums with each of these settings
ranks=$1; shift
for setting in "$@"; do
    python3 -m benchmarks.engine.sums --ranks "$ranks" --set "$setting" \
        --out "$LANE/$setting.jsonl" --commit "$COMMIT"
done
