#!/usr/bin/env bash
# Run the tests, each area with the interpreter of its real component: tests/run.sh [area ...]
# Areas: core trainer sglang vllm exact e2e. All by default. Heavy areas run one after another: they share two cores in CI.
set -uo pipefail
cd "$(dirname "$0")/.."
areas=("$@")
[ ${#areas[@]} -gt 0 ] || areas=(core trainer sglang vllm exact e2e)
failed=()
for area in "${areas[@]}"; do
  echo "== $area"
  case $area in
    core) env=core python=.venv/bin/python paths=(tests/layout tests/plan tests/transport tests/session tests/config tests/observe tests/repo) ;;
    trainer | sglang | vllm) env=$area python=.venvs/$area/bin/python paths=("tests/$area") ;;
    exact | e2e) env=core python=.venv/bin/python paths=("tests/$area") ;;
    *) echo "tests/run.sh: no area '$area'; there are: core trainer sglang vllm exact e2e" >&2; exit 2 ;;
  esac
  envs/build.sh "$env" || exit 1
  if [ "$area" = exact ] || [ "$area" = e2e ]; then for needed in trainer sglang vllm; do envs/build.sh $needed || exit 1; done; fi
  "$python" -m pytest -q -p no:cacheprovider "${paths[@]}" || failed+=("$area")
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "FAILED areas: ${failed[*]}" >&2
  exit 1
fi
