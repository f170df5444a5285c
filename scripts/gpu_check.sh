#!/usr/bin/env bash
# Every claim that needs a GPU, checked on one within 5 minutes, without a network:
#
#   [OUT=<folder>] scripts/gpu_check.sh [<folder with wheels that the machine lacks>]
#
# NOT YET RUN ON A GPU: only its parts were, on a CPU (DEVICE=cpu MODEL=tiny). The machine brings torch (2.11 or newer,
# CUDA), triton, pytest, pytest-benchmark, hypothesis and the common rest of pyproject.toml; the folder brings what is
# left (hydra-core, omegaconf, antlr4-python3-runtime, plotly, gguf). No real model is needed: weights are random.
#
# The records, their reports, a log a stage and the kernels' times go to results/reference/<gpu>/, as they are made
# anew; those of a run that is not repeated stay. In $OUT (build/gpu_check) lie summary.txt and, for who measures on
# another machine, the same files as records.tar.gz: unpack it at the project's root. Of a CPU nothing goes to
# results/reference. Exit status 1 if a stage failed; its log's end is shown.
#
# The model is Llama 3 8B's shape with as many of its 32 layers as there is time to make: 13 builds of it (6 arms of the
# ladder, 2 of graphs, 3 of load, 2 to look at tokens that differ) draw 8 billion random numbers each on the host, for
# weights must not depend on the device, and may take BUILD_S together. All 32 fit where a build takes 7 s. The number
# of layers stands in each record. LAYERS=32 forces it.
set -uo pipefail
case ${1:-} in -h | --help)
  sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
  exit
  ;;
esac
OUT=${OUT:-build/gpu_check}
OUT=$(mkdir -p "$OUT" && cd "$OUT" && pwd) || exit 1
wheels=$([ -z "${1:-}" ] || { cd "$1" && pwd; }) || exit 1
cd "$(dirname "$0")/.." || exit 1
DEVICE=${DEVICE:-cuda}
MODEL=${MODEL:-llama3_8b}
BUILD_S=${BUILD_S:-90}
PYTHON=${PYTHON:-python3}
LIMIT_S=${LIMIT_S:-285} # of all stages; what the records then take to pack fits into the rest of 5 minutes
STAGES=(machine kernels benchmarks fp8 ladder graphs load)
declare -A SECONDS_OF=([machine]=20 [kernels]=50 [benchmarks]=25 [fp8]=10 [ladder]=110 [graphs]=30 [load]=40)
ONLY=${ONLY-${STAGES[*]}} # stages to run
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch/records/logs"
failed=0

if [ -n "$wheels" ]; then
  "$PYTHON" -m pip install -q --no-index --no-deps --target "$scratch/wheels" "$wheels"/*.whl || exit 1
  export PYTHONPATH="$scratch/wheels${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONUNBUFFERED=1
"$PYTHON" -c 'import sys, torch; sys.exit(sys.argv[1] == "cuda" and not torch.cuda.is_available())' "$DEVICE" || {
  echo "no CUDA device that torch can use; DEVICE=cpu MODEL=tiny tries the parts of this script on a CPU"
  exit 1
}
: > "$OUT/summary.txt"

# stage <name> <command...>: it may take what those after it do not need, so what one leaves over serves the next.
stage() {
  local name=$1 left=$((LIMIT_S - SECONDS)) later=0 passed=0 begun=$SECONDS status=0 other
  local log="$scratch/records/logs/$name.log"
  shift
  [[ " $ONLY " == *" $name "* ]] || return
  for other in "${STAGES[@]}"; do
    [ "$passed" = 0 ] || later=$((later + SECONDS_OF[$other]))
    [ "$other" != "$name" ] || passed=1
  done
  if [ "$((left - later))" -lt 5 ]; then
    status="no time left"
  else
    timeout --kill-after=5 "$((left - later))" "$@" > "$log" 2>&1 || status="exit $?"
  fi
  printf '%-12s %-12s %4d s\n' "$name" "${status/#0/ok}" "$((SECONDS - begun))" | tee -a "$OUT/summary.txt"
  [ "$status" = 0 ] && return
  failed=1
  [ ! -f "$log" ] || tail -n 15 "$log"
}

# tests <options...>: by themselves, so that they need no more of pytest's plugins than they use.
tests() {
  "$PYTHON" -m pytest -q -p no:cacheprovider -o addopts= -m 'not slow' "$@"
}

at_once() { # at_once <test files...>: what they wait for is the compiler, and there is one on every core
  local pids=() status=0 file pid
  for file in "$@"; do
    tests "$file" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do
    wait "$pid" || status=1
  done
  return "$status"
}

harness() { # harness <run's name> <options...>, with weights and prompts that need no file
  local run=$scratch/records/$1
  shift
  "$PYTHON" -m harness "device=$DEVICE" "model=$MODEL" "model.shape.num_layers=$LAYERS" workload/prompts=random \
    "run_dir=$run" "$@" && "$PYTHON" -m scripts.gpu_checks run "$run" "$DEVICE"
}
export -f tests at_once harness
export DEVICE MODEL PYTHON scratch

stage machine "$PYTHON" -m scripts.gpu_checks machine "$DEVICE" "$MODEL" 13 "$BUILD_S" "$scratch"
LAYERS=${LAYERS:-$(cat "$scratch/layers" 2> /dev/null || echo 2)} # 2: the machine was not looked at
export LAYERS

# Triton against the reference (compiled where there is CUDA), a captured graph against eager, the same random numbers.
stage kernels bash -c 'at_once "$@"' - tests/attention/test_triton.py tests/precision/test_precision_triton.py \
  tests/execution/test_cuda_graph.py tests/decoding/test_counter_random.py

# Every attention kernel and linear method on this device against its reference, timed.
stage benchmarks bash -c 'tests "$@"' - tests/benchmarks/test_bench_kernels.py \
  --benchmark-json="$scratch/records/kernels.json"

stage fp8 "$PYTHON" -m scripts.gpu_checks fp8 "$DEVICE"

stage ladder bash -c 'harness ladder study=ladder study.trials=1 workload.num_requests=16'

if [ "$DEVICE" = cuda ]; then attention=triton; else attention=auto; fi # a graph holds Triton kernels
stage graphs bash -c 'harness graphs study=none execution=eager,cuda_graph "$@"' - "attention=$attention" \
  model.max_model_len=512 workload=ladder_burst workload.num_requests=16 batching.max_num_seqs=16

stage load bash -c 'harness load study=none workload=chat workload.arrivals.rate=8,32,128 "$@"' - \
  model.max_model_len=1024 workload.num_requests=32 workload.length_scale=0.5 workload.overlength=clip

# "NVIDIA H100 80GB HBM3" is h100_80gb_hbm3.
gpu=$(tr '[:upper:]' '[:lower:]' 2> /dev/null < "$scratch/gpu" | sed -E 's/^nvidia +//; s/[^a-z0-9]+/_/g; s/^_+|_+$//g')
[ "$DEVICE" = cuda ] || gpu=dry_run
place=results/reference/${gpu:-unknown_gpu}
find "$scratch/records" -name .lock -delete
cp "$OUT/summary.txt" "$scratch/records/"
mkdir -p "$scratch/tree/$place" && mv "$scratch/records"/* "$scratch/tree/$place/" || exit 1
tar czf "$OUT/records.tar.gz" -C "$scratch/tree" results || exit 1
if [ "$DEVICE" = cuda ]; then
  for made in "$scratch/tree/$place"/*; do
    rm -rf "${place:?}/${made##*/}"
  done
  tar xzf "$OUT/records.tar.gz" || exit 1
  echo "records: $place"
fi
exit "$failed"
