// Looking at a graph from Python, without taking part in it. All of it is a moment's view: others write meanwhile.
#pragma once

#include <nanobind/nanobind.h>

#include "endpoint.hpp"

namespace raycomm {

namespace nb = nanobind;

nb::tuple doing(const Arena& arena, uint32_t process);  // (activity, subject, seconds, iteration, processes it waits for)
// (kind, subject, iteration, start in ns of CLOCK_MONOTONIC, duration in ns, bytes), oldest first.
nb::list records(const Arena& arena, uint32_t process, size_t last);
// (calls, seconds in all, seconds of the longest) by place in the process's list of actions.
nb::list node_counters(const Arena& arena, uint32_t process);
nb::dict channel_counters(const Arena& arena, uint32_t writer, uint32_t channel);
// Bytes of a process's blocks that somebody holds, and a dict of them by holder: a block may have several.
nb::tuple held_blocks(const Arena& arena, uint32_t process);
nb::dict layout();  // sizes and offsets in bytes, by name

}  // namespace raycomm
