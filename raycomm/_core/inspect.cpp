// What a graph's shared memory says of it, as Python values: who does what, what was done, counters, who holds which blocks, the layout.
#include "inspect.hpp"

#include <algorithm>
#include <cstddef>
#include <map>

namespace raycomm {

nb::tuple doing(const Arena& arena, uint32_t process) {
  const Doing doing = arena.graph->board().doing(process);
  nb::list peers;
  for (uint32_t p = 0; p < kMaxProcesses; ++p)
    if (is_in(doing.waits_for, p)) peers.append(p);
  return nb::make_tuple(static_cast<uint32_t>(doing.kind), doing.subject, doing.seconds, doing.iteration, nb::tuple(peers));
}

nb::list records(const Arena& arena, uint32_t process, size_t last) {
  const MappingRef mapping = arena.graph->peer(process);
  const TickScale scale(*mapping);
  nb::list rows;
  const std::vector<Operation> recent = recent_operations(*mapping);
  for (size_t i = recent.size() > last ? recent.size() - last : 0; i < recent.size(); ++i) {
    const Operation& r = recent[i];
    rows.append(nb::make_tuple(static_cast<uint32_t>(r.kind), r.subject, r.iteration, scale.clock_ns(r.start), scale.ns(r.end > r.start ? r.end - r.start : 0), r.bytes));
  }
  return rows;
}

nb::list node_counters(const Arena& arena, uint32_t process) {
  const MappingRef mapping = arena.graph->peer(process);
  const TickScale scale(*mapping);
  nb::list rows;
  for (uint32_t i = 0; i < mapping->node_count(); ++i) {
    const NodeCounters& node = mapping->node(i);
    rows.append(nb::make_tuple(node.calls.load(std::memory_order_relaxed), scale.ns(node.ticks.load(std::memory_order_relaxed)) * 1e-9,
                               scale.ns(node.longest.load(std::memory_order_relaxed)) * 1e-9));
  }
  return rows;
}

nb::dict channel_counters(const Arena& arena, uint32_t writer, uint32_t channel) {
  const MappingRef mapping = arena.graph->peer(writer);
  const TickScale scale(*mapping);
  RingShape shape;
  const RingHeader& ring = mapping->ring(channel, shape);
  const Published& line = ring.published;
  const auto at = [](const std::atomic<uint64_t>& word) { return word.load(std::memory_order_relaxed); };
  nb::dict counters;
  counters["published"] = at(line.value);
  counters["bytes"] = at(line.bytes);
  counters["in_blocks"] = at(line.in_blocks);
  counters["pickles"] = at(line.pickles);
  counters["failures"] = at(line.failures);
  counters["write_waits"] = at(line.waits);
  counters["write_waited_s"] = scale.ns(at(line.waited)) * 1e-9;
  nb::list readers;
  const Cursor* taken = reinterpret_cast<const Cursor*>(reinterpret_cast<const unsigned char*>(&ring) + sizeof(RingHeader));
  for (uint32_t r = 0; r < shape.readers; ++r)
    readers.append(nb::make_tuple(at(taken[r].value), at(taken[r].waits), scale.ns(at(taken[r].waited)) * 1e-9));
  counters["readers"] = readers;
  return counters;
}

nb::tuple held_blocks(const Arena& arena, uint32_t process) {
  const MappingRef mapping = arena.graph->peer(process);
  std::map<uint32_t, uint64_t> bytes;
  uint64_t total = 0;
  each_held(*mapping, [&](const HeldBlock& block) {
    total += block.bytes;
    block.each_holder([&](uint32_t p) { bytes[p] += block.bytes; });
  });
  nb::dict holders;
  for (const auto& [p, held] : bytes) holders[nb::int_(p)] = held;
  return nb::make_tuple(total, holders);
}

nb::dict layout() {
  nb::dict d;
  d["version"] = kLayoutVersion;
  d["ArenaHeader"] = sizeof(ArenaHeader);
  d["RingHeader"] = sizeof(RingHeader);
  d["SlotHeader"] = sizeof(SlotHeader);
  d["BufferEntry"] = sizeof(BufferEntry);
  d["BlockHeader"] = sizeof(BlockHeader);
  d["Cursor"] = sizeof(Cursor);
  d["BoardRow"] = sizeof(BoardRow);
  d["Record"] = sizeof(Record);
  d["NodeCounters"] = sizeof(NodeCounters);
#define RAYCOMM_FIELD(type, field) d[#type "." #field] = offsetof(type, field)
  RAYCOMM_FIELD(ArenaHeader, magic);
  RAYCOMM_FIELD(ArenaHeader, layout_version);
  RAYCOMM_FIELD(ArenaHeader, owner_pid);
  RAYCOMM_FIELD(ArenaHeader, nonce);
  RAYCOMM_FIELD(ArenaHeader, file_bytes);
  RAYCOMM_FIELD(ArenaHeader, rings_offset);
  RAYCOMM_FIELD(ArenaHeader, blocks_offset);
  RAYCOMM_FIELD(ArenaHeader, pool_offset);
  RAYCOMM_FIELD(ArenaHeader, ring_count);
  RAYCOMM_FIELD(ArenaHeader, block_capacity);
  RAYCOMM_FIELD(ArenaHeader, board_offset);
  RAYCOMM_FIELD(ArenaHeader, claims_offset);
  RAYCOMM_FIELD(ArenaHeader, records_offset);
  RAYCOMM_FIELD(ArenaHeader, nodes_offset);
  RAYCOMM_FIELD(ArenaHeader, board_count);
  RAYCOMM_FIELD(ArenaHeader, claim_count);
  RAYCOMM_FIELD(ArenaHeader, record_capacity);
  RAYCOMM_FIELD(ArenaHeader, node_count);
  RAYCOMM_FIELD(ArenaHeader, waker);
  RAYCOMM_FIELD(ArenaHeader, closed);
  RAYCOMM_FIELD(ArenaHeader, doorbell.counter);
  RAYCOMM_FIELD(ArenaHeader, doorbell.sleepers);
  RAYCOMM_FIELD(ArenaHeader, doorbell.armed);
  RAYCOMM_FIELD(ArenaHeader, free_stack);
  RAYCOMM_FIELD(ArenaHeader, record_count);
  RAYCOMM_FIELD(ArenaHeader, start_ticks);
  RAYCOMM_FIELD(ArenaHeader, start_ns);
  RAYCOMM_FIELD(ArenaHeader, pool_committed);
  RAYCOMM_FIELD(ArenaHeader, block_count);
  RAYCOMM_FIELD(ArenaHeader, budget_limit);
  RAYCOMM_FIELD(ArenaHeader, budget_used);
  RAYCOMM_FIELD(ArenaHeader, budget_wanted_ns);
  RAYCOMM_FIELD(ArenaHeader, results_wanted_ns);
  RAYCOMM_FIELD(ArenaHeader, loop_state);
  RAYCOMM_FIELD(RingHeader, slots);
  RAYCOMM_FIELD(RingHeader, slot_bytes);
  RAYCOMM_FIELD(RingHeader, reader_count);
  RAYCOMM_FIELD(RingHeader, channel);
  RAYCOMM_FIELD(RingHeader, published);
  RAYCOMM_FIELD(SlotHeader, sequence);
  RAYCOMM_FIELD(SlotHeader, kind);
  RAYCOMM_FIELD(SlotHeader, payload_bytes);
  RAYCOMM_FIELD(SlotHeader, buffer_count);
  RAYCOMM_FIELD(SlotHeader, block_index);
  RAYCOMM_FIELD(SlotHeader, block_generation);
  RAYCOMM_FIELD(SlotHeader, reserved);
#undef RAYCOMM_FIELD
  return d;
}

}  // namespace raycomm
