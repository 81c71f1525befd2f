#!/usr/bin/env bash
# Run the tests, each area with the interpreter of its real component: tests/run.sh [area ...]
# Areas: core trainer sglang vllm exact miles verl verl-sglang e2e, all by default; by name only: verl-layouts (further layouts of
# verl's actors and engines, a job of a minute for each). Two lanes run side by side, for most tests keep one core busy; miles, verl
# and the end-to-end jobs start many processes and come last, alone. What an area prints is shown when it is done. Areas given by
# name run one after another, printing as they go.
set -uo pipefail
cd "$(dirname "$0")/.."

area() {
  local env envs=("$1") python paths=("tests/$1") needed rc=0
  case $1 in
    core) paths=(tests/{layout,plan,device,quant,delta,transport,session,sim,simulate,config,observe,commands,recipes,repo}) ;;
    trainer | sglang | vllm | miles | verl) ;;
    verl-sglang) paths=(tests/verl) ;;
    verl-layouts) envs=(verl verl-sglang) paths=(tests/verl/layouts.py) ;;
    exact | e2e) envs=(core) ;;
    *) echo "tests/run.sh: no area '$1'; there are: core trainer sglang vllm exact miles verl verl-sglang verl-layouts e2e" >&2; return 2 ;;
  esac
  echo "== $1"
  if [ "$1" = exact ] || [ "$1" = e2e ]; then for needed in trainer sglang vllm; do envs/build.sh $needed || return 1; done; fi
  for env in "${envs[@]}"; do
    envs/build.sh "$env" || return 1
    python=.venvs/$env/bin/python; [ "$env" = core ] && python=.venv/bin/python
    "$python" -m pytest -q -p no:cacheprovider "${paths[@]}" || { echo "FAILED area: $1 ($env)" >&2; rc=1; }
  done
  return $rc
}

lane() {  # its areas one after another, each with its output in one piece
  local name rc=0 log
  log=$(mktemp)
  for name in "$@"; do
    area "$name" >"$log" 2>&1 || rc=1
    flock "$printing" cat "$log"
  done
  rm -f "$log"
  return $rc
}

if [ $# -gt 0 ]; then
  rc=0
  for name in "$@"; do area "$name" || rc=1; done
  exit $rc
fi
printing=$(mktemp)
trap 'rm -f "$printing"; kill $(jobs -p) 2>/dev/null' EXIT
lane core sglang & first=$!
lane trainer vllm exact & second=$!
rc=0
wait $first || rc=1
wait $second || rc=1
area miles || rc=1
area verl || rc=1
area verl-sglang || rc=1
area e2e || rc=1
exit $rc
