# usage: compare.sh OLD NEW PAIRS ROW ...    benchmarks.ab of two packs
old=$1 new=$2 pairs=$3; shift 3
python3 -m benchmarks.ab "$old" "$new" --rows "$@" --repeats 10 \
    --pairs "$pairs" --max-pairs "$pairs" --out "$LANE/ab.jsonl"
