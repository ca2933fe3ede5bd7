#!/usr/bin/env bash
# Installs the MariaDB that tests/test_sql.py starts for itself, where that is possible without
# asking; without it these tests are skipped, with the reason.
if PATH=$PATH:/usr/sbin command -v mariadbd >/dev/null; then exit; fi
sudo=()
[ "$(id -u)" = 0 ] || sudo=(sudo -n)
if command -v apt-get >/dev/null && "${sudo[@]}" true 2>/dev/null; then
    log=$(mktemp)
    { "${sudo[@]}" apt-get update && "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends mariadb-server; } >"$log" 2>&1 && exit
    tail -n 3 "$log" >&2
fi
echo "mariadb-server is not installed; on Debian or Ubuntu: apt-get install mariadb-server" >&2
