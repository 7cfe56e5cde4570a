#!/usr/bin/env bash
# What has to be run on a machine with a CUDA device, in one go and without installing anything:
#   scripts/check_cuda.sh [FOLDER]      logs go to FOLDER (default: a new one under /tmp)
# every test that has a CUDA side (those parametrised for the CPU alone are left to `make test`), and beside them the
# example and the soak for SOAK_MINUTES (default 2). Exit status 0 if all of it is right.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-$(mktemp -d)}
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

"$python" -c 'import sys, torch; print(sys.version.split()[0], torch.__version__, torch.cuda.get_device_name(0))' \
    | tee "$out/versions.txt"
"$python" examples/train_digits.py > "$out/example.log" 2>&1 &
example=$!
"$python" tests/soak.py --steps 5000 --device cuda --seed "${SEED:-0}" --minutes "${SOAK_MINUTES:-2}" \
    > "$out/soak.log" 2>&1 &
soak=$!
bad=0
"$python" -m pytest -q -n "${JOBS:-12}" -k "not cpu" --deselect tests/test_packaging.py -p no:cacheprovider tests \
    > "$out/tests.log" 2>&1 || bad=1
grep -E "^FAILED|^ERROR |(passed|failed) in|passed" "$out/tests.log" | tail -n 30
wait "$example" || bad=1
tail -n 1 "$out/example.log"
wait "$soak" || bad=1
tail -n 1 "$out/soak.log"
echo "logs: $out"
exit "$bad"
