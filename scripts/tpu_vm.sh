#!/usr/bin/env bash
# Trains on all hosts of a Cloud TPU slice (TPU VMs), with gcloud from a machine of your own.
#
#   gcloud compute tpus tpu-vm create NAME --zone=ZONE --accelerator-type=v5litepod-16 --version=v2-alpha-tpuv5-lite
#   scripts/tpu_vm.sh install NAME ZONE dist/jaxtrain-0.1.0-py3-none-any.whl
#   scripts/tpu_vm.sh train NAME ZONE llama3_8b parallel.fsdp=16 train.accumulation_steps=4 --run-dir /mnt/runs/llama
#   scripts/tpu_vm.sh log NAME ZONE       follow the output of the first host
#   scripts/tpu_vm.sh stop NAME ZONE      save and stop (exit code 75); the same `train` goes on from there
#
# The hosts find each other through Google's metadata server, so that all get the same command. A run directory must be
# one that all hosts write to, such as a mounted Filestore, or a local one with checkpoint.directory=gs://BUCKET/RUN.
# `train` returns once the run has started: it goes on where this connection ends.
set -euo pipefail

usage() { sed -n '2,/^set /p' "$0" | sed -n 's/^# \{0,1\}//p' >&2; exit 2; }

# A slice has several hosts; --worker=all runs a command on each of them at once.
on_all() { gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"; }

[ $# -ge 3 ] || usage
action=$1 name=$2 zone=$3
shift 3
case $action in
  install)
    if [ $# -ne 1 ] || [ ! -f "$1" ]; then
      echo "tpu_vm.sh: install takes the wheel of jaxtrain, which 'python -m build --wheel' writes to dist/" >&2
      exit 2
    fi
    gcloud compute tpus tpu-vm scp "$1" "$name:" --zone="$zone" --worker=all
    # The machines come with Python 3.10; uv brings another.
    on_all "python3 -m pip install --user --quiet uv && ~/.local/bin/uv venv --quiet --allow-existing --python 3.11 jaxtrain-env &&
      ~/.local/bin/uv pip install --quiet --python jaxtrain-env/bin/python './$(basename "$1")[tpu]'"
    ;;
  train)
    [ $# -ge 1 ] || usage
    # Each word is quoted once for the shell of the hosts.
    words=$(printf '%q ' "$@")
    on_all "if [ -f jaxtrain.pid ] && kill -0 \$(cat jaxtrain.pid) 2>/dev/null; then echo 'a run is going on here' >&2; exit 1; fi
      nohup env JAX_PLATFORMS=tpu,cpu jaxtrain-env/bin/jaxtrain train $words >>jaxtrain.log 2>&1 </dev/null & echo \$! >jaxtrain.pid"
    ;;
  log) gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=0 --command="tail -n 50 -f jaxtrain.log" ;;
  stop) on_all "kill -TERM \$(cat jaxtrain.pid)" ;;
  *) usage ;;
esac
