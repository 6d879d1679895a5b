# Sourced by scripts/test, scripts/check and scripts/faults: steps with their times, and programs to install.
# It stops the script at the first command that fails. A step begins with a line "== step". At the end there is a
# table of the steps, and the line "== all passed" or "failed: step".
# If run as root with apt-get, it installs missing packages, except Rust.
# shellcheck shell=bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

step="looking for programs" begun=$SECONDS times=""
# Ends a step: adds its time to the table.
took() {
    times+=$(printf '%6d s  %s' $((SECONDS - begun)) "$step")$'\n'
    begun=$SECONDS
}
say() {
    took
    step=$*
    printf '\n== %s\n' "$step"
}
finish() {
    local status=$?
    took
    printf '\n== times of %s\n%s%6d s  together\n' "$0" "$times" "$SECONDS"
    if [ "$status" = 0 ]; then
        printf '== all passed\n'
    else
        printf 'failed: %s\n' "$step" >&2
    fi
}
trap finish EXIT
# The packages of scripts/test, in each command: with one set, Cargo builds the dependencies once. They have every feature
# but AWS-LC and OpenSSL, which take a minute to build: scripts/check has those.
# shellcheck disable=SC2034 # The scripts use it.
test_packages=(-p tower-dedup -p tower-dedup-cli -p tower-dedup-conformance -p hello -p receiver -p tower-dedup-inbox
    -p tower-dedup-judge --features "$(printf 'tower-dedup-inbox/%s,' postgres sqlite verify metrics)")
# Prints the reason and ends the script.
stop() {
    printf '%s\n' "$@" >&2
    exit 1
}
# Installs packages of Debian. Fails if it cannot.
install_packages() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "$@"
}

# Whatever builds the crate: a Rust toolchain, and a C compiler for SQLite.
need_build() {
    command -v cargo >/dev/null || stop "cargo is missing: install Rust (https://rustup.rs)"
    command -v cc >/dev/null || install_packages gcc libc6-dev || stop "a C compiler (cc) is missing: install gcc or clang"
}
# For the feature tls-native-tls, and for a test that makes certificates.
need_openssl() {
    command -v openssl >/dev/null || install_packages openssl || stop "openssl is missing: install openssl"
    [ "$(uname)" != Linux ] || pkg-config --exists openssl 2>/dev/null || install_packages pkg-config libssl-dev ||
        stop "OpenSSL's headers are missing: install pkg-config and libssl-dev (Debian) or openssl-devel (Fedora)"
}
need_component() {
    cargo "${1/rustfmt/fmt}" --version >/dev/null 2>&1 && return
    command -v rustup >/dev/null && rustup component add "$1" && return
    stop "$1 is missing: run rustup component add $1"
}
# The servers that the tests start.
need_servers() {
    if [ -z "${TEST_POSTGRES_URL:-}" ] && ! ./scripts/postgres --find >/dev/null 2>&1; then
        install_packages postgresql || true
        # scripts/postgres prints the packages to install.
        ./scripts/postgres --find >/dev/null || stop "or set TEST_POSTGRES_URL to the URL of a running server"
    fi
    if ! ./scripts/redis --find >/dev/null 2>&1; then
        # The package redis-server would start a service. It only links to this program of redis-tools.
        install_packages redis-tools && ln -sf /usr/bin/redis-check-rdb /usr/local/bin/redis-server || true
        # scripts/redis prints the packages to install.
        ./scripts/redis --find >/dev/null || stop "the tests start Redis servers of their own"
    fi
}
# One test starts a server with German messages, because the code must not parse messages.
need_locale() {
    { command -v localedef >/dev/null && [ -e /usr/share/i18n/locales/de_DE ]; } || install_packages locales ||
        stop "the source of the locale de_DE is missing: install locales (Debian) or glibc-locale-source (Fedora)"
}
# The judge runs a receiver in Python, and counts effects by psql.
need_python() {
    command -v python3 >/dev/null || install_packages python3 || stop "python3 is missing: install python3"
    command -v psql >/dev/null || install_packages postgresql-client ||
        stop "psql is missing: install postgresql-client (Debian), postgresql (Fedora) or libpq (Homebrew)"
}
# The server that the tests of examples/own_store start.
need_mariadb() {
    # The package would start a service, unless a policy forbids it: only its programs are needed.
    local policy=/usr/sbin/policy-rc.d
    local path=$PATH:/usr/sbin
    PATH=$path command -v mariadbd >/dev/null && command -v mariadb-install-db >/dev/null && return
    if [ "$(id -u)" = 0 ] && [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
        install_packages mariadb-server || true
        rm "$policy"
    else
        install_packages mariadb-server || true
    fi
    PATH=$path command -v mariadbd >/dev/null ||
        stop "MariaDB is missing: install mariadb-server (Debian, Fedora) or mariadb (Homebrew)"
}
# promtool runs the tests of the alerts in examples/observability.
need_promtool() {
    command -v promtool >/dev/null && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        # Only this program: the package would start a server.
        local deb
        deb=$(mktemp -d)
        apt-get update -q
        (cd "$deb" && apt-get download -q prometheus && dpkg-deb --extract prometheus_*.deb .)
        install "$deb/usr/bin/promtool" /usr/local/bin/
        rm -rf "$deb"
    else
        stop "promtool is missing: install prometheus (Debian, Homebrew) or golang-github-prometheus (Fedora)"
    fi
}
