#!/usr/bin/env bash
# Compiles the native core for arm64 with a cross compiler from PyPI (zig), against this machine's Python headers, and links it.
# It is not run: that takes such a machine.   usage: cross_arm64.sh PYTHON
set -euo pipefail
python=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
out=$here/build/arm64
mkdir -p "$out"
include=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')
nanobind=$("$python" -c 'import nanobind, os; print(os.path.dirname(nanobind.__file__))')
compile=("$python" -m ziglang c++ -target aarch64-linux-gnu.2.28 -std=c++20 -O2 -fPIC -Wall -Wextra -Wno-missing-field-initializers)
objects=()
for source in "$here"/raycomm/_core/*.cpp "$nanobind/src/nb_combined.cpp"; do
  object=$out/$(basename "$source").o
  "${compile[@]}" -I"$include" -I"$nanobind/include" -I"$nanobind/ext/robin_map/include" -c "$source" -o "$object"
  objects+=("$object")
done
"${compile[@]}" -shared -Wl,-z,undefs -o "$out/_core.so" "${objects[@]}"
"$python" - "$out/_core.so" <<'PY'
import struct, sys
with open(sys.argv[1], "rb") as file:
    head = file.read(20)
machine = struct.unpack_from("<H", head, 18)[0]
assert head[:4] == b"\x7fELF" and machine == 183, f"not an arm64 library: machine {machine}"
print(f"arm64: {sys.argv[1]} compiles and links")
PY
