#!/usr/bin/env bash
# Every claim that needs a GPU, checked on one within 5 minutes, without a network:
#
#   OUT=<folder for what comes back> scripts/gpu_check.sh [<folder with wheels that the machine lacks>]
#
# NOT YET RUN ON A GPU: only its parts were, on a CPU (DEVICE=cpu MODEL=tiny). The machine brings torch (2.11 or newer,
# CUDA), triton, pytest, pytest-benchmark, hypothesis and the common rest of pyproject.toml; the folder brings what is
# left (hydra-core, omegaconf, antlr4-python3-runtime, plotly, gguf). No real model is needed: weights are random.
#
# Left in $OUT: summary.txt and records.tar.gz with the runs' records and reports, a log a stage, the kernels' times. To
# keep them: tar xzf records.tar.gz -C results/reference/<gpu>. Exit status 1 if a stage failed; its log's end is shown.
set -uo pipefail
OUT=$(mkdir -p "${OUT:?set OUT to a folder for what comes back}" && cd "$OUT" && pwd)
wheels=$([ -z "${1:-}" ] || { cd "$1" && pwd; }) || exit 1
cd "$(dirname "$0")/.." || exit 1
DEVICE=${DEVICE:-cuda}
MODEL=${MODEL:-llama3_8b}
LAYERS=${LAYERS:-8} # of the model's 32: a quarter of the work, and of the minutes that making weights takes
LIMIT_S=${LIMIT_S:-285}
PYTHON=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch/records/logs"
failed=0

if [ -n "$wheels" ]; then
  "$PYTHON" -m pip install -q --no-index --no-deps --target "$scratch/wheels" "$wheels"/*.whl || exit 1
  export PYTHONPATH="$scratch/wheels${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONUNBUFFERED=1
: > "$OUT/summary.txt"

# stage <name> <most seconds> <command...>: at most what is left of LIMIT_S; its log goes to the records.
stage() {
  local name=$1 most=$2 begun=$SECONDS left=$((LIMIT_S - SECONDS)) status=0
  local log="$scratch/records/logs/$name.log"
  shift 2
  if [ "$left" -lt 5 ]; then
    status="no time left"
  else
    timeout --kill-after=10 "$((most < left ? most : left))" "$@" > "$log" 2>&1 || status="exit $?"
  fi
  printf '%-12s %-12s %4d s\n' "$name" "${status/#0/ok}" "$((SECONDS - begun))" | tee -a "$OUT/summary.txt"
  [ "$status" = 0 ] && return
  failed=1
  [ ! -f "$log" ] || tail -n 15 "$log"
}

harness() { # harness <run's name> <options...>, with weights and prompts that need no file
  local run=$1
  shift
  "$PYTHON" -m harness "device=$DEVICE" "model=$MODEL" "model.shape.num_layers=$LAYERS" workload/prompts=random \
    "run_dir=$scratch/records/$run" "$@" && "$PYTHON" - "$scratch/records/$run/summary.json" "$DEVICE" << 'EOF'
import json, sys

arms = json.load(open(sys.argv[1]))["arms"]
for name, arm in arms.items():
    print(name, arm["status"], *arm["reasons"], arm["metrics"].get("output_tokens_per_s"))
bad = [name for name, arm in arms.items() if arm["status"] != "ok"]
sys.exit(f"did not run: {bad}" if bad and sys.argv[2] == "cuda" else 0)
EOF
}
export -f harness
export DEVICE MODEL LAYERS PYTHON scratch

stage machine 30 "$PYTHON" -c '
import sys, time
import torch, triton
from harness.telemetry.gpu import gpu_source

print(sys.version, torch.__version__, triton.__version__, torch.version.cuda)
if sys.argv[1] == "cuda":
    print(torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))
    source = gpu_source()
    assert source is not None, "NVML does not answer"
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):  # a rate needs two readings, and something to see between them
        for _ in range(50):
            square @ square
        torch.cuda.synchronize()
        time.sleep(0.2)  # GPM gives no figure for less than 0.1 s; what lies behind us counts
        readings = source.read()
    for reading in readings:
        print(*reading)
    known = {reading.name for reading in readings if reading.value is not None}
    print("GPM answers" if "sm_active_percent" in known else "GPM gives no figure: is this GPU older than Hopper, or a slice?")
    missing = {"utilization_percent", "memory_used_bytes", "power_w", "sm_clock_hz", "temperature_c"} - known
    assert not missing, f"NVML gives no {missing}"
' "$DEVICE"

# Triton against the reference (compiled where there is CUDA), a captured graph against eager, the same random numbers.
stage kernels 110 "$PYTHON" -m pytest -q -p no:cacheprovider \
  tests/attention/test_triton.py tests/execution/test_cuda_graph.py tests/decoding/test_counter_random.py

# Every attention kernel and linear method on this device against its reference, timed.
stage benchmarks 60 "$PYTHON" -m pytest -q -p no:cacheprovider tests/benchmarks/test_bench_kernels.py \
  --benchmark-json="$scratch/records/kernels.json"

# FP8 is multiplied as FP8, not emulated, for every number of rows that a step may have and for both granularities.
stage fp8 40 "$PYTHON" -c '
import sys
import torch
from impls.precision.fp8 import Fp8, multiplies_fp8

device = torch.device(sys.argv[1])
granularities = ["tensor"]
if device.type == "cuda":
    assert multiplies_fp8(device), "this GPU has no FP8 product (compute capability 8.9 on)"
if device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0):
    granularities.append("row")
draw = torch.Generator().manual_seed(0)
weight = torch.randn(1024, 512, generator=draw) / 512**0.5
for granularity in granularities:
    method = Fp8(device, granularity=granularity)
    packed = method.pack(weight)
    for rows in (1, 2, 5, 16, 33, 256):
        x = torch.randn(rows, 512, generator=draw).to(device, method.activation_dtype)
        values, scale = method.quantize_activations(x)
        exact = (values.double() * scale.double()) @ method.dequantize(packed).to(device).double().T
        torch.testing.assert_close(method.apply(x, packed).double(), exact, rtol=2e-2, atol=2e-2)
    print(granularity, method.kernel, method.emulated)
    assert (method.kernel == "scaled_mm") == (device.type == "cuda")
' "$DEVICE"

stage ladder 130 bash -c 'harness ladder study=ladder study.trials=1 workload.num_requests=24'

if [ "$DEVICE" = cuda ]; then attention=triton; else attention=auto; fi # a graph holds Triton kernels
stage graphs 60 bash -c 'harness graphs study=none execution=eager,cuda_graph "$@"' - "attention=$attention" \
  model.max_model_len=512 workload=ladder_burst workload.num_requests=16 batching.max_num_seqs=16

stage load 75 bash -c 'harness load study=none workload=chat workload.arrivals.rate=4,16,64 "$@"' - \
  model.max_model_len=1024 workload.num_requests=32 workload.length_scale=0.5 workload.overlength=clip

tar czf "$OUT/records.tar.gz" -C "$scratch/records" .
exit "$failed"
