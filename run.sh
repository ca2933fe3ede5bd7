#!/usr/bin/env bash
# Sets up what is missing, then trains or tests:
#   bash run.sh ENV [settings]         train and evaluate; --help lists the settings; ENV is an
#                                      environment of those below: bash run.sh webshop
#   bash run.sh test [pytest options]  run the tests
#   bash run.sh page RUN               a run as a page, RUN/run.html
#   bash run.sh play ENV [TASK]        play a task yourself; --agent RUN: with a trained agent
#   bash run.sh compare RUN RUN ...    one report on several runs: means over seeds, by method, or
#                                      by names of your own: NAME=RUN NAME=RUN ...
#   bash run.sh study ENV [...]        methods x seeds and one report; --help lists what it takes
#   bash run.sh learn FILE.jsonl --model FOLDER_OR_HUB_NAME [settings]
#                                      train on trajectories of your own (docs/library.md)
# An active environment that satisfies requirements.txt is used as it is; otherwise .venv is made
# beside this file. PYTHON=/path/to/python3 chooses the interpreter. A relative path among the
# settings is relative to the folder you call this from.
set -euo pipefail
here=$(CDPATH= cd -- "$(dirname -- "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
venv=$here/.venv

fail() { echo "run.sh: $*" >&2; exit 2; }

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

# Prints what interpreter $1 lacks of requirements.txt; fails if that is anything.
satisfied() { "$1" "$here/lab/requirements.py" "$here/requirements.txt" 2>/dev/null; }

# Sets `torch` to what is said of the wheel for this machine, `index` to where it is; empty: PyPI,
# whose wheels for Linux are gigabytes of CUDA. An empty CUDA_VISIBLE_DEVICES asks for the CPU's.
choose_torch() {
    local cpu=https://download.pytorch.org/whl/cpu version=
    torch=PyPI index=
    if [ "$(uname)" != Linux ]; then return; fi
    if [ "${CUDA_VISIBLE_DEVICES-all}" = "" ]; then torch="for CPUs" index=$cpu
    elif [ -e /dev/nvidia0 ] || command -v nvidia-smi >/dev/null; then torch="for CUDA"
    elif [ -e /dev/kfd ]; then
        read -r version 2>/dev/null </opt/rocm/.info/version || true
        [[ $version =~ ^[0-9]+\.[0-9]+ ]] ||
            fail "this machine has an AMD GPU, but no /opt/rocm/.info/version says which ROCm;" \
                 "install ROCm, or train on the CPU: CUDA_VISIBLE_DEVICES= bash run.sh $command"
        torch="for ROCm $BASH_REMATCH" index=https://download.pytorch.org/whl/rocm$BASH_REMATCH
    else torch="for CPUs" index=$cpu; fi
}

# Makes .venv complete. The file `installing` marks one that an interruption left half-made.
install() {
    local log=$here/.venv-install.log torch index
    if [ -e "$venv/installing" ]; then rm -rf "$venv"; fi
    if [ -e "$venv" ]; then
        supported "$venv/bin/python" || fail "$venv has no Python 3.10-3.13; delete it, run again"
        if satisfied "$venv/bin/python" >/dev/null; then return; fi
    fi
    choose_torch
    echo "run.sh: installing packages into $venv, some minutes ($python lacks $1);" \
         "torch $torch" >&2
    mkdir -p "$venv" && touch "$venv/installing"
    "$python" -m venv "$venv" >"$log" 2>&1 || {
        rm -rf "$venv"
        fail "$python cannot make a virtual environment; on Debian or Ubuntu:" \
             "apt install python3-venv (details: $log)"; }
    if [ -n "$index" ] && ! "$venv/bin/python" -m pip config list | grep index-url >/dev/null; then
        "$venv/bin/python" -m pip install --index-url "$index" \
            "$(grep -o '^torch[^ ]*' "$here/requirements.txt")" >>"$log" 2>&1 ||
            [ "$torch" = "for CPUs" ] || {  # for which PyPI's do as well
                rm "$venv/installing"
                fail "pip found no torch $torch; install it yourself into $venv (pip's output: $log)"; }
    fi
    "$venv/bin/python" -m pip install -r "$here/requirements.txt" \
        $(sed -n 's/^# optional: \([^ ]*\).*/\1/p' "$here/requirements.txt") >>"$log" 2>&1 || {
        rm "$venv/installing"
        fail "pip could not install the packages; check the network, or set PIP_INDEX_URL to an" \
             "index within reach, and run again (pip's output: $log)"; }
    rm "$venv/installing"
}

# Adds package $1 to .venv, but none that it asks for: they would be others than those tested.
add() {
    echo "run.sh: installing $1 into $venv" >&2
    { if command -v flock >/dev/null; then flock 9; fi
      "$venv/bin/python" -m pip install --no-deps --retries 1 "$1" >>"$here/.venv-install.log" 2>&1
    } 9>"$here/.venv.lock"
}

# Makes .venv-appworld, for the package of appworld alone: it pins other versions than ours. A file
# there says which package it has; without it, it is half-made.
install_appworld() {
    local package apps=$here/.venv-appworld log=$here/.venv-appworld-install.log other=
    package=$(sed -n 's/^# appworld: \([^ ]*\).*/\1/p' "$here/requirements.txt")
    if [ -e "$apps/has-${package/==/-}" ]; then return; fi
    for candidate in "$python" python3 python3.12 python3.11 python3.13; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
            2>/dev/null; then other=$candidate; break; fi
    done
    if [ -z "$other" ]; then
        echo "run.sh: appworld needs Python 3.11, 3.12 or 3.13 for its package; install one" >&2
        return 1
    fi
    echo "run.sh: installing $package into $apps, a minute or two" >&2
    rm -rf "$apps"
    { "$other" -m venv "$apps" && "$apps/bin/python" -m pip install "$package" &&
        APPWORLD_CACHE=$apps/cache "$apps/bin/appworld" install &&
        touch "$apps/has-${package/==/-}"; } >"$log" 2>&1 || {
        echo "run.sh: the package of appworld was not installed; check the network, or set" \
             "PIP_INDEX_URL to an index within reach, and run again (details: $log)" >&2
        return 1; }
}

environments=
for file in "$here"/environments/*/__init__.py; do
    folder=${file%/*}
    environments+=" ${folder##*/}"
done

usage() {
    sed -n '2,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    echo "Environments:$environments"
}

command=${1:-}
case $command in
    -h | --help) usage; exit ;;
    "") usage >&2; exit 2 ;;
esac
shift

python=
candidates=(python3 python3.12 python3.11 python3.13 python3.10)
if [ -n "${PYTHON-}" ]; then candidates=("$PYTHON"); fi
for candidate in "${candidates[@]}"; do
    if supported "$candidate"; then python=$candidate; break; fi
done
[ -n "$python" ] || fail "${PYTHON:-python3} is missing or not Python 3.10-3.13;" \
    "install one of these, or name it: PYTHON=/path/to/python3.12 bash run.sh $command"

commands="test page play compare study learn$environments"
case " $commands " in *" $command "*) ;; *)
    nearest=$("$python" -c 'import difflib, sys
print(*difflib.get_close_matches(sys.argv[1], sys.argv[2:], 1, 0.4))' "$command" $commands)
    fail "unknown command '$command'${nearest:+, the nearest is $nearest}; bash run.sh lists all" ;;
esac

if ! lacks=$(satisfied "$python"); then
    if [ -e "$venv/installing" ] || ! satisfied "$venv/bin/python" >/dev/null; then
        { if command -v flock >/dev/null; then flock 9; fi; install "$lacks"; } 9>"$here/.venv.lock"
    fi
    python=$venv/bin/python
fi

case "$command ${1:-}" in bfcl* | test* | "play bfcl" | "study bfcl")  # one more package; the tests can do without
    package=$(sed -n 's/^# bfcl: \([^ ]*\).*/\1/p' "$here/requirements.txt")
    if ! "$python" "$here/lab/requirements.py" <(echo "$package") >/dev/null 2>&1; then
        { [ "$python" = "$venv/bin/python" ] && add "$package"; } || [ "$command" = test ] ||
            fail "bfcl needs one more package: $python -m pip install --no-deps $package"
    fi
esac

case "$command ${1:-}" in appworld* | test* | "play appworld" | "study appworld")
    { if command -v flock >/dev/null; then flock 9; fi
      install_appworld || [ "$command" = test ] || exit 2; } 9>"$here/.venv-appworld.lock" ;;
esac

# Runs a program of ours in the folder you call this from; from Python 3.11 on nothing is imported
# from there.
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}  # threads that spin take others' cores
program() { exec "$python" -m "$@"; }

# Prints the number of GPUs that torch can use, which CUDA_VISIBLE_DEVICES may limit. Where there is
# no device of a GPU, torch need not be asked.
gpus() {
    if [ ! -e /dev/nvidia0 ] && [ ! -e /dev/kfd ] && ! command -v nvidia-smi >/dev/null; then echo 0
    else "$python" -c 'import torch; print(torch.cuda.device_count())'; fi
}

# The same as a process for each GPU. Where one ends with an error, all end.
on_all_gpus() {
    local count n status=0 of
    count=$(gpus)
    if [ "$count" -lt 2 ]; then program "$@"; fi
    export WORLD_SIZE=$count LOCAL_WORLD_SIZE=$count MASTER_ADDR=127.0.0.1
    export MASTER_PORT=${MASTER_PORT:-$((20000 + RANDOM % 20000))}
    trap 'kill $(jobs -p) 2>/dev/null' INT TERM
    for ((n = 0; n < count; n++)); do RANK=$n LOCAL_RANK=$n "$python" -m "$@" & done
    for ((n = 0; n < count; n++)); do
        of=0; wait -n || of=$?
        if [ $of -ne 0 ] && [ $status -eq 0 ]; then status=$of; sleep 6; kill $(jobs -p) 2>/dev/null || true; fi
    done
    exit $status
}

case $command in
    page | study) program "lab.$command.$command" "$@" ;;
    learn) on_all_gpus lab.learn "$@" ;;
    play) program lab.chat.play "$@" ;;
    compare) program lab.study.compare "$@" ;;
    test)
        cd "$here"
        unset PYTHONSAFEPATH
        export CUDA_VISIBLE_DEVICES=  # the tests compare to the bit, or nearly, on the CPU
        exec "$python" -m pytest -q -rs --durations=10 -n logical --maxprocesses 4 \
            --dist loadfile --no-loadscope-reorder "$@" ;;
    *) on_all_gpus lab --env "$command" "$@" ;;
esac
