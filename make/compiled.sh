#!/usr/bin/env bash
# Keep build/compiled up to date: the package extproc with its hot path compiled, to be put on PYTHONPATH.
#
# Built only where a source has changed, by its content. The checkout itself stays free of compiled modules, since one
# that outlives its source would be run in its place.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
compiled=build/compiled

mkdir -p build
exec 9>build/lock # two suites may start at once: the second waits for the first
flock 9

sources=$({
    "$python" -c 'import sys, mypy.version; print(sys.version, mypy.version.__version__)'
    find extproc envoy hatch_build.py pyproject.toml -type f -not -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum
} | sha256sum)
[[ $(cat $compiled/sources 2>/dev/null) == "$sources" ]] && exit
rm -rf $compiled build/wheel

if ! "$python" - <<'PY'; then
import shutil, sys, sysconfig
from pathlib import Path

compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
sys.exit(not (shutil.which(compiler) and Path(sysconfig.get_paths()["include"], "Python.h").exists()))
PY
    echo "not compiled: it takes a C compiler and Python's headers (Debian: gcc, python3-dev)" >&2
    exit 1
fi
echo "compiling the router's hot path (a minute; later ones take less)"
if ! HATCH_BUILD_HOOK_ENABLE_CUSTOM=true "$python" -m hatchling build --target wheel --directory build/wheel >build/log 2>&1; then
    tail -n 20 build/log >&2
    echo "not compiled: see build/log" >&2
    exit 1
fi
"$python" -m zipfile -e build/wheel/*.whl build/wheel
mkdir $compiled
mv build/wheel/extproc build/wheel/extproc__mypyc* $compiled # the other packages are run from the checkout
echo "$sources" >$compiled/sources # last: it says that the rest is whole
