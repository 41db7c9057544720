# usage: goodput.sh LOAD LAYOUT[=RATES] ...    windows of benchmarks.goodput
# BEFORE names the folder with the tree of the layout `before`. logs.sh keeps what clusters log.
load=$1; shift
for layout in "$@"; do
    IFS== read -r name rates <<< "$layout"
    python3 -m benchmarks.goodput --out "$LANE" --only "$load-$name" --commit "$COMMIT" \
        ${rates:+--rates "$rates"} ${BEFORE:+--before "$BEFORE"}
    bash "$(dirname "$0")/logs.sh" "$load-$name"
done
