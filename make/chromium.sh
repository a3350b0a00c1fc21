#!/usr/bin/env bash
# Debian's Chromium and its driver, which are always of one version; installed where they are missing.
set -euo pipefail
missing=()
command -v chromium > /dev/null || missing+=(chromium)
command -v chromedriver > /dev/null || missing+=(chromium-driver)
((${#missing[@]})) || exit 0
if ! command -v apt-get > /dev/null; then
    echo "the browser suite needs chromium and chromedriver on the PATH; without apt-get, install them by hand" >&2
    exit 1
fi
root=()
if ((EUID)); then
    if ! sudo -n true 2> /dev/null; then
        echo "the browser suite needs: sudo apt-get install ${missing[*]}" >&2
        exit 1
    fi
    root=(sudo -n)
fi
"${root[@]}" apt-get update -qq
"${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends "${missing[@]}" > /dev/null
