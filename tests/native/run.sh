#!/usr/bin/env bash
# Builds the stress and the tests of waits and copies under ThreadSanitizer and under Address- and UndefinedBehaviorSanitizer, and runs them.
# Usage: tests/native/run.sh [seed] [seconds]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
seed=${1:-$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}
seconds=${2:-20}

# ThreadSanitizer of older compilers cannot place its shadow where a kernel with much ASLR entropy puts the program.
fixed=()
if setarch -R true 2>/dev/null; then fixed=(setarch -R); fi

status=0
for kind in tsan:thread asan:address,undefined; do
  name=${kind%%:*}
  build="$root/build/sanitize/$name"
  cmake -S "$here" -B "$build" -DSANITIZE="${kind#*:}" >/dev/null
  cmake --build "$build" -j2 >/dev/null
  echo "== $name, seed $seed, $seconds s"
  TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1" ASAN_OPTIONS="detect_leaks=1 strict_string_checks=1" \
    UBSAN_OPTIONS="print_stacktrace=1" timeout $((seconds * 10)) "${fixed[@]}" "$build/stress" "$seed" "$seconds" || status=$?
  for program in waits copies; do timeout 60 "${fixed[@]}" "$build/$program" || status=$?; done
done
exit "$status"
