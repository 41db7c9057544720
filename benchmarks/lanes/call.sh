#!/usr/bin/env bash
# Runs lanes (run.sh) on a GPU machine without network, with the packages that pack.sh has packed.
#
#     SITE=.carry/full/site.tar.xz benchmarks/lanes/call.sh OUT SECONDS COMMIT LANE ...
#
# The packages are unpacked once per machine. OUT gets lanes.tar.xz. Lines of progress bars are left
# out of what is printed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
unpacked=/tmp/lanes-site
if [ ! -e "$unpacked/done" ]; then
    mkdir -p "$unpacked"
    xz -dc -T0 --memlimit=2GiB "$SITE" | tar -C "$unpacked" -xf -
    touch "$unpacked/done"
fi
export PYTHONPATH=$unpacked${PYTHONPATH:+:$PYTHONPATH}
"$here/run.sh" "$@" | tr '\r' '\n' | sed '/%|/d'
