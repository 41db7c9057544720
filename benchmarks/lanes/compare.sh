# usage: compare.sh COMMIT FOLDER PAIRS ROW ...    benchmarks.ab of the two packs in FOLDER
# COMMIT is the name of the newer pack.
commit=$1 folder=$2 pairs=$3; shift 3
old=$(ls "$folder"/*.tar.xz | grep -v "$commit")
python3 -m benchmarks.ab "$old" "$folder/$commit.tar.xz" --rows "$@" --repeats 10 \
    --pairs "$pairs" --max-pairs "$pairs" --out "$LANE/ab.jsonl"
