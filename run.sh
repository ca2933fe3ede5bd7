#!/usr/bin/env bash
# Installs missing packages, then runs a command:
#   bash run.sh ENV [settings]         train and evaluate in one of the environments below, for
#                                      example: bash run.sh webshop; --help lists the settings
#   bash run.sh test [pytest options]  run the tests
#   bash run.sh page RUN               make the page of a run, RUN/run.html
#   bash run.sh play ENV [TASK]        play a task yourself, or with a trained agent: --agent RUN
#   bash run.sh compare RUN RUN ...    make a report on several runs, with means over seeds for each
#                                      method, or for each name that you give: NAME=RUN NAME=RUN ...
#   bash run.sh study ENV [...]        run methods x seeds and make a report; --help lists options
#   bash run.sh learn FILE.jsonl --model FOLDER_OR_HUB_NAME [settings]
#                                      train on your own trajectories (docs/library.md)
# If the active environment satisfies requirements.txt, it is used unchanged. Otherwise .venv is made
# next to this file. PYTHON=/path/to/python3 selects the interpreter. Relative paths in settings are
# relative to the folder in which you call run.sh.
set -euo pipefail
here=$(CDPATH= cd -- "$(dirname -- "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
venv=$here/.venv

fail() { echo "run.sh: $*" >&2; exit 2; }

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

# Prints the requirements that interpreter $1 lacks. Fails if there are any.
satisfied() { "$1" "$here/lab/requirements.py" "$here/requirements.txt" 2>/dev/null; }

# These two find the GPUs of a machine. engine/machine.py has the same rule: a container may have only
# some of the GPU devices, and WSL has none of them.
has_nvidia() {
    compgen -G '/dev/nvidia[0-9]*' >/dev/null || [[ $(nvidia-smi -L 2>/dev/null) == "GPU "* ]]
}
has_amd() { [ -e /dev/kfd ]; }

# Chooses the torch wheel for this machine. Sets `torch` to its description and `index` to the package
# index that has it, which is empty for PyPI, whose wheels for Linux need 5 GB with the packages of
# CUDA. CUDA_VISIBLE_DEVICES selects the wheel for CPUs if it is empty or -1.
choose_torch() {
    local cpu=https://download.pytorch.org/whl/cpu version=
    torch=PyPI index=
    if [ "$(uname)" != Linux ]; then return; fi
    if [[ ${CUDA_VISIBLE_DEVICES-all} =~ ^(-1)?$ ]]; then torch="for CPUs" index=$cpu
    elif has_nvidia; then torch="for CUDA"
    elif has_amd; then
        read -r version 2>/dev/null </opt/rocm/.info/version || true
        [[ $version =~ ^[0-9]+\.[0-9]+ ]] ||
            fail "this machine has an AMD GPU, but no ROCm version in /opt/rocm/.info/version;" \
                 "install ROCm, or train on the CPU: CUDA_VISIBLE_DEVICES= bash run.sh $command"
        torch="for ROCm $BASH_REMATCH" index=https://download.pytorch.org/whl/rocm$BASH_REMATCH
    else torch="for CPUs" index=$cpu; fi
}

# Makes .venv, or installs packages that it lacks. $1 lists the requirements that $python lacks. The
# file .venv/installing exists during an installation, and remains if this is interrupted.
install() {
    local log=$here/.venv-install.log torch index
    if [ -e "$venv/installing" ]; then rm -rf "$venv"; fi
    if [ -e "$venv" ]; then
        supported "$venv/bin/python" || fail "$venv has no Python 3.10-3.13; delete it and rerun"
        if satisfied "$venv/bin/python" >/dev/null; then return; fi
    fi
    choose_torch
    echo "run.sh: installing packages into $venv, which takes minutes ($python lacks $1);" \
         "torch $torch" >&2
    mkdir -p "$venv" && touch "$venv/installing"
    "$python" -m venv "$venv" >"$log" 2>&1 || {
        rm -rf "$venv"
        fail "$python cannot make a virtual environment; on Debian or Ubuntu:" \
             "apt install python3-venv (details: $log)"; }
    if [ -n "$index" ] && ! "$venv/bin/python" -m pip config list | grep index-url >/dev/null; then
        if ! "$venv/bin/python" -m pip install --retries 0 --index-url "$index" \
            "$(grep -o '^torch[^ ]*' "$here/requirements.txt")" >>"$log" 2>&1; then
            if [ "$torch" != "for CPUs" ]; then
                rm "$venv/installing"
                fail "pip found no torch $torch; install it into $venv yourself (pip's output: $log)"
            fi
            echo "run.sh: pip got no torch from $index, so it installs PyPI's, which also runs on" \
                 "CPUs, but needs 5 GB with the packages of CUDA" >&2
        fi
    fi
    "$venv/bin/python" -m pip install -r "$here/requirements.txt" \
        $(sed -n 's/^# optional: \([^ ]*\).*/\1/p' "$here/requirements.txt") >>"$log" 2>&1 || {
        rm "$venv/installing"
        fail "pip could not install the packages; check the network, or set PIP_INDEX_URL to an" \
             "index within reach, and rerun (pip's output: $log)"; }
    rm "$venv/installing"
}

# Installs package $1 into .venv without its dependencies, which pin versions that were not tested.
add() {
    echo "run.sh: installing $1 into $venv" >&2
    { if command -v flock >/dev/null; then flock 9; fi
      "$venv/bin/python" -m pip install --no-deps --retries 1 "$1" >>"$here/.venv-install.log" 2>&1
    } 9>"$here/.venv.lock"
}

# Makes .venv-appworld for the package appworld, which pins other versions than requirements.txt. A
# file in it names the installed version. Without this file, the installation is incomplete.
install_appworld() {
    local package apps=$here/.venv-appworld log=$here/.venv-appworld-install.log other=
    package=$(sed -n 's/^# appworld: \([^ ]*\).*/\1/p' "$here/requirements.txt")
    if [ -e "$apps/has-${package/==/-}" ]; then return; fi
    for candidate in "$python" python3 python3.12 python3.11 python3.13; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
            2>/dev/null; then other=$candidate; break; fi
    done
    if [ -z "$other" ]; then
        echo "run.sh: the package appworld needs Python 3.11, 3.12 or 3.13; install one" >&2
        return 1
    fi
    echo "run.sh: installing $package into $apps, which takes a minute or two" >&2
    rm -rf "$apps"
    { "$other" -m venv "$apps" && "$apps/bin/python" -m pip install "$package" &&
        APPWORLD_CACHE=$apps/cache "$apps/bin/appworld" install &&
        touch "$apps/has-${package/==/-}"; } >"$log" 2>&1 || {
        echo "run.sh: the package appworld was not installed; check the network, or set" \
             "PIP_INDEX_URL to an index within reach, and rerun (details: $log)" >&2
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
    "install one of these, or select one: PYTHON=/path/to/python3.12 bash run.sh $command"

commands="test page play compare study learn$environments"
case " $commands " in *" $command "*) ;; *)
    nearest=$("$python" -c 'import difflib, sys
print(*difflib.get_close_matches(sys.argv[1], sys.argv[2:], 1, 0.4))' "$command" $commands)
    fail "unknown command '$command'${nearest:+ (did you mean $nearest?)}; bash run.sh lists all" ;;
esac

if ! lacks=$(satisfied "$python"); then
    if [ -e "$venv/installing" ] || ! satisfied "$venv/bin/python" >/dev/null; then
        { if command -v flock >/dev/null; then flock 9; fi; install "$lacks"; } 9>"$here/.venv.lock"
    fi
    python=$venv/bin/python
fi

# bfcl needs one more package. Without it, the tests that need it are skipped.
case "$command ${1:-}" in bfcl* | test* | "play bfcl" | "study bfcl")
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

# Programs run in the current folder. From Python 3.11 on, PYTHONSAFEPATH keeps them from importing
# modules of that folder.
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}  # spinning threads would block other processes
program() { exec "$python" -m "$@"; }

# Prints the number of GPUs that torch can use, which CUDA_VISIBLE_DEVICES may limit. Without a GPU
# device, the slow import of torch is skipped.
gpus() {
    if has_nvidia || has_amd; then "$python" -c 'import torch; print(torch.cuda.device_count())'
    else echo 0; fi
}

# Runs a program as one process per GPU. If one of them fails, all are ended.
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
        export CUDA_VISIBLE_DEVICES=  # on the CPU, the tests compare exact or nearly exact numbers
        exec "$python" -m pytest -q -rs --durations=10 -n logical --maxprocesses 4 \
            --dist loadfile --no-loadscope-reorder "$@" ;;
    *) on_all_gpus lab --env "$command" "$@" ;;
esac
