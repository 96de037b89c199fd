# Sourced by the other scripts: one line per step, with its seconds, and its output only when it fails.

now_us() { echo "${EPOCHREALTIME/[.,]/}"; }

# seconds_since US: "12.3 s"
seconds_since() {
    local tenths=$((($(now_us) - $1) / 100000))
    printf '%d.%d s' $((tenths / 10)) $((tenths % 10))
}

# step TEXT COMMAND…: run a command quietly; its status is the command's.
step() {
    local text=$1 started log child status=0
    shift
    started=$(now_us)
    log=$(mktemp)
    printf '  %-50s ' "$text"
    # A process group of its own, so that Ctrl-C leaves nothing half done in the background.
    set -m
    "$@" >"$log" 2>&1 </dev/null &
    child=$!
    set +m
    trap 'kill -- "-$child" 2>/dev/null; rm -f "$log"; echo stopped; exit 130' INT TERM
    if [ -t 1 ]; then
        while kill -0 "$child" 2>/dev/null; do
            printf '\r  %-50s %s … ' "$text" "$(seconds_since "$started")"
            sleep 0.1
        done
        printf '\r  %-50s ' "$text"
    fi
    wait "$child" || status=$?
    trap - INT TERM
    if [ "$status" -eq 0 ]; then
        printf 'ok    %s   \n' "$(seconds_since "$started")"
    else
        printf 'FAIL  %s   \n' "$(seconds_since "$started")"
        sed 's/^/        /' "$log"
    fi
    rm -f "$log"
    return "$status"
}
