#!/usr/bin/env bash
# Run promtool: the one that is installed, else Debian's, kept outside the checkout.
#
# The package `prometheus` is fetched and unpacked by apt and dpkg, not installed: it would start a server.
#
#   XDG_CACHE_HOME   where it is kept (default ~/.cache)
set -euo pipefail

if command -v promtool >/dev/null; then
    exec promtool "$@"
fi

cache=${XDG_CACHE_HOME:-$HOME/.cache}/prefix-affinity-router
promtool=$cache/promtool
if [[ ! -x $promtool ]]; then
    if ! command -v apt-get >/dev/null; then
        echo "promtool is not installed (it comes with Prometheus), and this is no Debian to fetch it from" >&2
        exit 1
    fi
    mkdir -p "$cache"
    scratch=$(mktemp -d "$cache/promtool.XXXXXX")
    trap 'rm -rf "$scratch"' EXIT
    cd "$scratch"
    {
        if ! apt-get download -qq prometheus; then # a fresh machine has no lists of packages yet
            if ((EUID)); then sudo -n apt-get update -qq; else apt-get update -qq; fi
            apt-get download -qq prometheus
        fi
        dpkg --extract prometheus_*.deb .
    } >&2
    cd "$OLDPWD"
    mv "$scratch/usr/bin/promtool" "$promtool"
    rm -rf "$scratch"
fi
exec "$promtool" "$@"
