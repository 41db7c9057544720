# usage: several.sh GPUS PART ...    parts of benchmarks.several_gpus
gpus=$1; shift
for part in "$@"; do
    python3 -m benchmarks.several_gpus --gpus "$gpus" --out "$LANE" --only "$part" \
        --commit "$COMMIT"
done
