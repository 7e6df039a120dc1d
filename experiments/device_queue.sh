#!/usr/bin/env bash
# What still waits for a GPU, in order of worth, in at most eight minutes: bash experiments/device_queue.sh [OUT]
#
# Leaves in OUT (./device_queue unless named, or $OUT) gpu_suite.json and, where torch is installed,
# gpu_suite_peer.json, both written after each line; and autotune.tgz, what XLA found about products. The next run on
# the same kind of device begins with it: commit it as experiments/results/autotune_DEVICE_jaxVERSION.tgz.
# SIZE=tiny tries it on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-${OUT:-device_queue}}
mkdir -p "$out"
out=$(cd "$out" && pwd)

python=.venv/bin/python
[ -x "$python" ] || python=python3
# An image may lack some packages, and have no network: wheels beside the checkout are enough.
[ -d wheels ] && "$python" -m pip install --quiet --no-index --find-links wheels pydantic omegaconf grain

export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$out/cache}
mkdir -p "$JAX_COMPILATION_CACHE_DIR"
tuned=xla_gpu_per_fusion_autotune_cache_dir
device=$("$python" -c 'import jax; print(jax.devices()[0].device_kind.lower().replace(" ", "_") + "_jax" + jax.__version__)')
kept=experiments/results/autotune_$device.tgz
if [ -f "$kept" ]; then
    tar xzf "$kept" -C "$JAX_COMPILATION_CACHE_DIR"
fi

status=0
PYTHONPATH=. timeout 400 "$python" experiments/gpu_suite.py --size "${SIZE:-8B}" --budget 320 \
    --only step speculation quantised verification kv_cache plain graphs long \
    --results "$out/gpu_suite.json" || status=$?
# A framework that people use, on the same device: torch, where the image has it. Two processes share the memory.
left=$((470 - SECONDS))
if [ "$left" -gt 60 ] && "$python" -c 'import torch' 2>/dev/null; then
    size=1B
    [ "${SIZE:-8B}" = tiny ] && size=tiny
    XLA_PYTHON_CLIENT_PREALLOCATE=false PYTHONPATH=. timeout "$left" "$python" experiments/gpu_suite.py --size $size \
        --only peer --results "$out/gpu_suite_peer.json" || status=$?
fi
if [ -d "$JAX_COMPILATION_CACHE_DIR/$tuned" ]; then
    tar czf "$out/autotune.tgz" -C "$JAX_COMPILATION_CACHE_DIR" "$tuned"
    echo "kept: $out/autotune.tgz; the next run reads it from $kept"
fi
exit $status
