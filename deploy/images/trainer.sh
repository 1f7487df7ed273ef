#!/bin/sh
# The trainer of run $RUN in a container: `trainer.sh RUN.toml [OPTION...]`. Continues the run if its checkpoints are
# on the volume already: the same command serves for the first start and every later one.
# Ends with the trainer's status, but with 143 if a signal stopped it before the end of the run: what restarts failed
# containers then continues it, and 0 means that the run is complete.
set -u

: "${RUN:?the name of the run is missing}"
RUNS=${RUNS:-/runs}
set -- "$@" --name "$RUN" --runs "$RUNS" --set metrics.host=0.0.0.0
for file in "$RUNS/$RUN/checkpoints/epoch-"*; do
    if [ -e "$file" ]; then
        set -- "$@" --resume
        break
    fi
done

stopped=
child=
trap 'stopped=yes; [ -z "$child" ] || kill -TERM "$child"' TERM INT
penstock trainer "$@" &
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
penstock report "$RUN" --runs "$RUNS" || echo "trainer.sh: the run is complete; its report could not be written" >&2
