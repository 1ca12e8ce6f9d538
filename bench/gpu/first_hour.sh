#!/usr/bin/env bash
# The first hour on GPUs, in parts that stop in time. Each part prints its figures, and the rule that decides by them;
# `python -m bench.gpu.decisions FOLDER` prints all again.
#
#   bench/gpu/first_hour.sh FOLDER ahead        before, on any machine: compiles what the first part launches
#   bench/gpu/first_hour.sh FOLDER one          one GPU: 50 minutes; the first 10 have the checks and what changed last
#   bench/gpu/first_hour.sh FOLDER one WORDS    only `python -m bench.gpu.run WORDS`, as does make gpu ARGS="WORDS"
#   bench/gpu/first_hour.sh FOLDER eight        the GPUs of one node: 70 minutes
#   bench/gpu/first_hour.sh FOLDER two HEAD     on each of two nodes at a time: 10 minutes. HEAD: the first one's name
#                                               (the rows are then in the folder of one of them)
#
# With --rehearse before FOLDER, the same in tiny shapes on the CPU, by Triton's interpreter and over gloo; HEAD is then
# localhost, and both "nodes" are this machine.
#
# A second call goes on where the first one stopped. $PYTHON has torch, numpy and einops; nothing is installed. To time
# the newest Triton beside the installed one: pip install --no-deps --target FOLDER/triton-newest triton

usage() {
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 2
}

rehearse=
if [ "$1" = --rehearse ]; then
    rehearse=--rehearse
    shift
fi
[ $# -ge 2 ] && mkdir -p "$1" || usage
folder=$(cd "$1" && pwd) what=$2 failed=
shift 2
cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ -d "$folder/triton" ]; then
    export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$folder/triton}"
fi

if [ -z "$rehearse" ]; then
    gpus=8 interpret=0 tests=() long=(--case "causal 16384") eight_ranks=(--case "8 ranks" --case "causal 65536") wide=(--case 128)
    trace=(torch.distributed.run --nproc-per-node 8 -m bench.cpu.timeline) calibrate=(--ranks 8)
else
    gpus=2 interpret=1 tests=(-k rehearsed) long=() eight_ranks=() wide=()  # a rehearsal has few cases
    trace=(bench.cpu.timeline --tokens 256 --calls 1) calibrate=(--ranks 2 --device cpu --quick)
fi

# part NAME MINUTES COMMAND: two minutes more end a case that does not stop by itself
part() {
    local name=$1 minutes=$2 code
    shift 2
    printf '\n== %s, at most %s minutes: %s\n' "$name" "$minutes" "$*"
    timeout --kill-after 30 $((60 * minutes + 120)) "$@"
    code=$?
    if [ $code -ne 0 ]; then
        failed="$failed $name"
        echo "$name ended with exit code $code"
    fi
    "$python" -m bench.gpu.decisions "$folder" --part "$name"
}

# on one GPU: NAME MINUTES WORDS
run() {
    local name=$1 minutes=$2
    shift 2
    part "$name" "$minutes" "$python" -m bench.gpu.run $rehearse --json "$folder/gpu.jsonl" --minutes "$minutes" "$@"
}

# a rank for each GPU: NAME MINUTES WORDS
ranks() {
    local name=$1 minutes=$2
    shift 2
    part "$name" "$minutes" "$python" -m torch.distributed.run --nproc-per-node $gpus -m bench.gpu.nccl $rehearse \
        --json "$folder/nccl.jsonl" --minutes "$minutes" "$@"
}

one() {
    run correct 6 --slice correct
    run trees 2 --slice trees
    run accumulate 2 --slice accumulate
    run speed 4 --slice forward --slice backward "${long[@]}"
    if [ -d "$folder/triton-newest" ]; then
        part newest 5 env PYTHONPATH="$folder/triton-newest:$PYTHONPATH" TRITON_CACHE_DIR="$folder/triton-newest-cache" \
            "$python" -m bench.gpu.run $rehearse --json "$folder/gpu-newest.jsonl" --minutes 5 \
            --slice forward --slice backward "${long[@]}"
    fi
    run profile 4 --slice profile
    run ring 6 --slice ring --slice step "${eight_ranks[@]}"
    run tune 5 --slice tune "${wide[@]}"
    run comm 3 --slice comm
    run rest 10
}

eight() {
    part nccl 5 env TRITON_INTERPRET=$interpret "$python" -m pytest -q tests/comm/test_nccl.py "${tests[@]}"
    ranks hops 5 --slice open --slice hops --slice all-to-alls
    NCCL_P2P_NVL_CHUNKSIZE=131072 ranks hops 3 --slice hops
    NCCL_MIN_P2P_NCHANNELS=64 ranks hops 3 --slice hops
    ranks hops 3 --slice hops --min-ctas 16
    run comm 8 --slice comm
    ranks layers 8 --slice layers
    CUDA_DEVICE_MAX_CONNECTIONS=32 ranks layers 6 --slice layers
    ranks layers 4 --slice layers --shared
    ranks layers 4 --slice layers --symmetric
    part trace 3 "$python" -m "${trace[@]}" --out "$folder/trace.json"
    part lost 3 "$python" -m bench.gpu.lost $rehearse --json "$folder/lost.jsonl"
    ranks magi 8 --slice magi
    part calibrate 6 "$python" -m seqpar calibrate --out "$folder/hardware.json" "${calibrate[@]}"
}

two() {
    local head=$1
    case $head in *:*) ;; *) head=$head:29500 ;; esac
    part two 10 "$python" -m torch.distributed.run --nnodes 2 --nproc-per-node $gpus --rdzv-backend c10d \
        --rdzv-endpoint "$head" -m bench.gpu.nccl $rehearse --json "$folder/two-nodes.jsonl" --minutes 10 \
        --slice open --slice hops --slice layers
}

{ # read as a whole, so that an edit meanwhile changes nothing
    case $what-$# in
        ahead-0) TRITON_CACHE_DIR="$folder/triton" exec "$python" -m bench.gpu.ahead ;;
        one-0) one ;;
        one-*)
            case " $* " in *" --rehearse "*) ;; *) set -- --json "$folder/gpu.jsonl" "$@" ;; esac
            exec "$python" -m bench.gpu.run "$@"
            ;;
        eight-0) eight ;;
        two-1) two "$1" ;;
        *) usage ;;
    esac
    if [ -n "$failed" ]; then
        printf '\nnot right:%s\n' "$failed"
        exit 1
    fi
    exit 0
}
