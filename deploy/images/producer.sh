#!/bin/sh
# A producer in a container: `producer.sh [OPTION...]` joins run $RUN in the Redis at $REDIS_URL. Its id is the container's
# host name and process id. With $TRAINER_GPU every producer of this machine takes a GPU of its own, and none takes that
# one.
set -u

: "${RUN:?the name of the run is missing}"
RUNS=${RUNS:-/runs}
set -- --join "${REDIS_URL:?the address of Redis is missing}" --run "$RUN" --runs "$RUNS" --set metrics.host=0.0.0.0 "$@"
if [ -n "${TRAINER_GPU:-}" ]; then
    # The runtime gives a scaled service's containers all the same GPUs. A lock on a file of the shared volume is held
    # until this process ends, however it ends.
    locks=${GPU_LOCKS:-/runs}
    taken=
    for gpu in $(nvidia-smi --query-gpu=index --format=csv,noheader); do
        [ "$gpu" != "$TRAINER_GPU" ] || continue
        exec 9>"$locks/gpu-$gpu.lock"
        if flock --nonblock 9; then
            taken=$gpu
            break
        fi
    done
    if [ -z "$taken" ]; then
        echo "producer.sh: no GPU is free; expected one for each producer, and GPU $TRAINER_GPU for the trainer" >&2
        exit 2
    fi
    # CUDA numbers GPUs by speed unless told to count as nvidia-smi does.
    export CUDA_VISIBLE_DEVICES="$taken" CUDA_DEVICE_ORDER=PCI_BUS_ID
fi
exec penstock producer "$@"
