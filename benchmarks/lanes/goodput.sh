# usage: goodput.sh COMMIT LOAD LAYOUT[=RATES] ...    windows of benchmarks.goodput
# The tree of the layout `before` is in the folder $BEFORE.
commit=$1 load=$2; shift 2
for layout in "$@"; do
    IFS== read -r name rates <<< "$layout"
    python3 -m benchmarks.goodput --out "$LANE" --only "$load-$name" --commit "$commit" \
        ${rates:+--rates "$rates"} ${BEFORE:+--before "$BEFORE"}
done
