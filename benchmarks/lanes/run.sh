#!/usr/bin/env bash
# Runs several measurements at a time on one host of GPUs. Each lane has its own GPUs, its own share
# of the CPU cores, and its own folder.
#
#     benchmarks/lanes/run.sh OUT SECONDS COMMIT 'GPUS SCRIPT WORDS ... + SCRIPT WORDS ...' ...
#     benchmarks/lanes/run.sh lanes 570 1a2b3c4 '0,1 several.sh 2 8b-tp2' '2 rows.sh qwen3-30b-a3b'
#
# SCRIPT is one of this folder; those of a lane run one after another. WORDS may be quoted. A
# script finds in its environment: LANE, the folder for its results, and COMMIT, which is noted in
# them. A lane that is not done after SECONDS is stopped. All folders are packed into
# OUT/lanes.tar.xz, and the end of each log is printed.
set -u
out=$1 seconds=$2; shift 2
export COMMIT=$1; shift
here=$(cd "$(dirname "$0")" && pwd)
cores=$(nproc) gpus=$(nvidia-smi --list-gpus | wc -l)
scratch=$(mktemp -d)
export RAY_AUTH_MODE=disabled PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 TOKENIZERS_PARALLELISM=false
cd "$here/../.." || exit
export PYTHONPATH=$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}

share() {  # the CPU cores of some GPUs, as taskset takes them
    local each=$((cores / gpus)) gpu
    for gpu in ${1//,/ }; do echo "$((gpu * each))-$((gpu * each + each - 1))"; done | paste -sd,
}

for lane in "$@"; do
    read -r devices scripts <<< "$lane"
    folder=$scratch/gpu-${devices//,/}
    mkdir -p "$folder"
    for part in "${scripts// + /$'\n'}"; do
        while read -r script words; do echo "bash '$here/$script' $words"; done <<< "$part"
    done > "$folder/plan"
    LANE=$folder RAY_TMPDIR=/tmp/ray-${devices//,/} CUDA_VISIBLE_DEVICES=$devices \
        timeout --kill-after=5 "$seconds" taskset -c "$(share "$devices")" \
            bash -x "$folder/plan" > "$folder/log" 2>&1 < /dev/null &
done
wait
mkdir -p "$out"
tar -C "$scratch" -cf - . | xz -T0 -1 > "$out/lanes.tar.xz"
for log in "$scratch"/*/log; do echo "== $log"; tail -n 20 "$log"; done
