#!/usr/bin/env bash
# Runs several measurements at a time on one host of GPUs. Each has its own GPUs, its own share of
# the CPU cores, and its own folder.
#
#     benchmarks/lanes/run.sh OUT SECONDS 'GPUS SCRIPT COMMIT WORDS ...' ...
#     benchmarks/lanes/run.sh lanes 570 '0,1 two_gpus.sh 1a2b3c4' '2 mixtures.sh 1a2b3c4'
#
# SCRIPT is one of this folder. It gets LANE, the folder for its results, and COMMIT is noted in
# them. A lane that is not done after SECONDS is stopped. All folders are packed into
# OUT/lanes.tar.xz, and the end of each log is printed.
set -u
out=$1 seconds=$2; shift 2
here=$(cd "$(dirname "$0")" && pwd)
cores=$(nproc) gpus=$(nvidia-smi --list-gpus | wc -l)
scratch=$(mktemp -d)
export RAY_AUTH_MODE=disabled PYTHONUNBUFFERED=1 NCCL_NVLS_ENABLE=0
export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 TOKENIZERS_PARALLELISM=false
cd "$here/../.."
export PYTHONPATH=$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}

share() {  # the CPU cores of some GPUs, as taskset takes them
    local each=$((cores / gpus)) gpu
    for gpu in ${1//,/ }; do echo "$((gpu * each))-$((gpu * each + each - 1))"; done | paste -sd,
}

for lane in "$@"; do
    read -r devices script words <<< "$lane"
    folder=$scratch/$(basename "$script" .sh)-${devices//,/}
    mkdir -p "$folder"
    # shellcheck disable=SC2086  # the words of a lane are words
    LANE=$folder CUDA_VISIBLE_DEVICES=$devices timeout --kill-after=5 "$seconds" \
        taskset -c "$(share "$devices")" bash "$here/$script" $words > "$folder/log" 2>&1 &
done
wait
mkdir -p "$out"
tar -C "$scratch" -cf - . | xz -T0 -1 > "$out/lanes.tar.xz"
for log in "$scratch"/*/log; do echo "== $log"; tail -n 25 "$log"; done
