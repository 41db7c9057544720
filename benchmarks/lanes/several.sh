# usage: several.sh COMMIT GPUS PART ...    parts of benchmarks.several_gpus
commit=$1 gpus=$2; shift 2
for part in "$@"; do
    python3 -m benchmarks.several_gpus --gpus "$gpus" --out "$LANE" --only "$part" --commit "$commit"
done
