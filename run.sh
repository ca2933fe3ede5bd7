#!/usr/bin/env bash
# Sets up what is missing, then trains or tests:
#   bash run.sh webshop [settings]     train and evaluate; --help lists the settings
#   bash run.sh scienceworld [settings]
#   bash run.sh intercodesql [settings]
#   bash run.sh show RUN [tasks]       trajectories of a run, side by side
#   bash run.sh compare RUN RUN ...    means over seeds, by method
#   bash run.sh study webshop [...]    methods x seeds and one report; --help lists what it takes
#   bash run.sh load-intercode DUMP --admin-url URL --mysql-url URL
#                                      InterCode's databases into a MySQL or MariaDB server
#   bash run.sh compare-intercode FOLDER --mysql-url URL
#                                      how far sqlite's answers to its questions equal a server's
#   bash run.sh test [pytest options]  run the tests
#   bash run.sh bench [--quick]        what training and rollouts cost, beside other code
# An active environment that satisfies requirements.txt is used as it is; otherwise .venv is made
# beside this file. PYTHON=/path/to/python3 chooses the interpreter. A relative path among the
# settings is relative to the folder you call this from.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=$here/.venv

fail() { echo "run.sh: $*" >&2; exit 2; }

supported() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

# Prints the lines of requirements.txt that interpreter $1 does not satisfy; fails if there are any.
satisfied() {
    "$1" - "$here/requirements.txt" 2>/dev/null <<'END'
import sys
from importlib.metadata import PackageNotFoundError, version
try:
    from packaging.requirements import Requirement
except ImportError:
    sys.exit(print("packaging (found none)") or 1)
lacking = []
for line in filter(None, (line.split("#")[0].strip() for line in open(sys.argv[1]))):
    wanted = Requirement(line)
    try:
        found = version(wanted.name)
    except PackageNotFoundError:
        found = None
    if not found or not wanted.specifier.contains(found, prereleases=True):
        lacking.append(f"{line} (found {(found or 'none')})")
print(", ".join(lacking))
sys.exit(bool(lacking))
END
}

# Makes .venv complete. The file `installing` marks one that an interruption left half-made.
install() {
    local log=$here/.venv-install.log
    if [ -e "$venv/installing" ]; then rm -rf "$venv"; fi
    if [ -e "$venv" ]; then
        supported "$venv/bin/python" || fail "$venv has no Python 3.10-3.13; delete it, run again"
        if satisfied "$venv/bin/python" >/dev/null; then return; fi
    fi
    echo "run.sh: installing packages into $venv, some minutes ($python lacks $1)" >&2
    mkdir -p "$venv" && touch "$venv/installing"
    "$python" -m venv "$venv" >"$log" 2>&1 || {
        rm -rf "$venv"
        fail "$python cannot make a virtual environment; on Debian or Ubuntu:" \
             "apt install python3-venv (details: $log)"; }
    # PyPI's torch for Linux brings gigabytes of CUDA; without a GPU the CPU build is enough.
    if [ "$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null &&
            ! "$venv/bin/python" -m pip config list | grep index-url >/dev/null; then
        "$venv/bin/python" -m pip install --index-url https://download.pytorch.org/whl/cpu \
            "$(grep -o '^torch[^ ]*' "$here/requirements.txt")" >>"$log" 2>&1 || true
    fi
    "$venv/bin/python" -m pip install -r "$here/requirements.txt" \
        -r "$here/requirements-optional.txt" >>"$log" 2>&1 || {
        rm "$venv/installing"
        fail "pip could not install the packages; check the network, or set PIP_INDEX_URL to an" \
             "index within reach, and run again (pip's output: $log)"; }
    rm "$venv/installing"
}

# `accelerate launch` with two changes: without an `accelerate config` of the user it is told what
# it would otherwise guess aloud, and what ends a training process is said once and its exit status
# passed on.
launch='
import logging, os, signal, subprocess, sys
import psutil, torch
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import main
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

if not os.path.isfile(default_config_file):
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    bf16 = gpus and torch.cuda.is_bf16_supported(including_emulation=False)
    sys.argv[1:1] = [f"--num_processes={gpus or 1}", "--num_machines=1", "--dynamo_backend=no",
                     "--mixed_precision=" + ("bf16" if bf16 else "no")]
    sys.argv[1:1] = ["--multi_gpu"] if gpus > 1 else []
# Ctrl-C reaches the training process by itself, kill does not; either way wait until it has ended.
signal.signal(signal.SIGINT, lambda *_: None)
signal.signal(signal.SIGTERM, lambda *_: [p.terminate() for p in psutil.Process().children()])
logging.disable(logging.ERROR)  # of several processes: what the training process said is enough
try:
    main()
except subprocess.CalledProcessError as error:  # its message is on the screen already
    sys.exit(error.returncode if error.returncode > 0 else 128 - error.returncode)
except ChildFailedError as error:  # of several processes; likewise
    rank, failure = error.get_first_failure()
    code = failure.exitcode
    if code < 0:
        print(f"run.sh: process {rank} was ended by signal {-code}", file=sys.stderr)
    sys.exit(code if code > 0 else 128 - code)
except SignalException as error:  # of several processes, which the launcher has ended
    sys.exit(128 + error.sigval)
'

command=${1:-} environment=
case $command in
    webshop | scienceworld | intercodesql) environment=$command; shift ;;
    show | compare | study | load-intercode | compare-intercode | test | bench) shift ;;
    *) sed -n '2,17s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac

python=
for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.13 python3.10}; do
    if supported "$candidate"; then python=$candidate; break; fi
done
[ -n "$python" ] || fail "${PYTHON:-python3} is missing or not Python 3.10-3.13;" \
    "install one of these, or name it: PYTHON=/path/to/python3.12 bash run.sh $command"

if [ -n "$environment" ]; then  # a mistyped setting is refused before anything is installed
    "$python" "$here/settings.py" --env "$environment" "$@" || exit 2
    for flag in "$@"; do case $flag in -h | --help) exit ;; esac; done
fi
if ! lacks=$(satisfied "$python"); then
    { if command -v flock >/dev/null; then flock 9; fi; install "$lacks"; } 9>"$here/.venv.lock"
    python=$venv/bin/python
fi
if [ "$command" = test ]; then
    cd "$here"
    export CUDA_VISIBLE_DEVICES=  # the tests compare to the bit, or nearly, on the CPU
    exec "$python" -m pytest -q -rs -o testpaths=tests -n logical --maxprocesses 4 --dist loadfile "$@"
fi
if [[ $command = *-intercode ]]; then exec "$python" "$here/databases.py" "$command" "$@"; fi
if [ "$command" = bench ]; then exec "$python" "$here/tests/bench.py" "$@"; fi
if [ "$command" = study ]; then exec "$python" "$here/study.py" "$@"; fi
if [ -z "$environment" ]; then exec "$python" "$here/coevolve.py" "$command" "$@"; fi
exec "$python" -c "$launch" "$here/coevolve.py" --env "$environment" "$@"
