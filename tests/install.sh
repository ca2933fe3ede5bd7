#!/usr/bin/env bash
# `install.sh COMMAND PACKAGE` installs a package of Debian's that gives a command, where that is
# possible without asking: mariadbd, which tests/test_sql.py starts for itself, and chromium, in which
# tests/test_page.py looks at pages. Without them these tests are skipped, with the reason.
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
