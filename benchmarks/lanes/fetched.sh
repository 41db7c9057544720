# usage: fetched.sh WORDS ...    first tokens where another worker has the prompt's beginning
python3 -m benchmarks.cluster.fetched_prefix --out "$LANE/fetched.jsonl" --commit "$COMMIT" "$@"
