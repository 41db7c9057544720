# usage: compare.sh OLD NEW PAIRS REPEATS ROW ...    benchmarks.ab of two packs
old=$1 new=$2 pairs=$3 repeats=$4; shift 4
python3 -m benchmarks.ab "$old" "$new" --rows "$@" --repeats "$repeats" \
    --pairs "$pairs" --max-pairs "$pairs" --out "$LANE/ab.jsonl"
