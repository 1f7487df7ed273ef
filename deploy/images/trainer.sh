#!/bin/sh
# The trainer of run $RUN in a container: `trainer.sh RUN.toml [OPTION...]`. Continues the run if its checkpoints are
# on the volume already: the same command serves for the first start and every later one.
# With $PET_NNODES this is one of so many pods of an Indexed Job, and torchrun, which takes its options from PET_*, starts
# this pod's ranks. It starts them again by itself, so they always continue; $JOB_COMPLETION_INDEX 0 is where they meet.
# Ends with the trainer's status, but with 143 if a signal stopped it before the end of the run: what restarts failed
# containers then continues it, and 0 means that the run is complete.
set -u

: "${RUN:?the name of the run is missing}"
RUNS=${RUNS:-/runs}
set -- "$@" --name "$RUN" --runs "$RUNS" --set metrics.host=0.0.0.0
first=yes
if [ -n "${PET_NNODES:-}" ]; then
    [ "${JOB_COMPLETION_INDEX:?the number of this pod is missing}" = 0 ] || first=
    # Left to itself torchrun compares names, which the cluster may not know yet.
    set -- torchrun --rdzv-conf "is_host=${first:-no},read_timeout=600" --no-python penstock trainer "$@" --resume
else
    set -- penstock trainer "$@"
    for file in "$RUNS/$RUN/checkpoints/epoch-"*; do
        if [ -e "$file" ]; then
            set -- "$@" --resume
            break
        fi
    done
fi

stopped=
child=
trap 'stopped=yes; [ -z "$child" ] || kill -TERM "$child"' TERM INT
"$@" &
child=$!
[ -z "$stopped" ] || kill -TERM "$child"
status=0
wait "$child" || status=$?
# A signal ends `wait` early.
while kill -0 "$child" 2>/dev/null; do
    status=0
    wait "$child" || status=$?
done
[ "$status" -eq 0 ] || exit "$status"
[ -z "$stopped" ] || exit 143
[ -n "$first" ] || exit 0
penstock report "$RUN" --runs "$RUNS" || echo "trainer.sh: the run is complete; its report could not be written" >&2
