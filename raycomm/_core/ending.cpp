// What becomes of shared memory when its processes leave a graph, or die in it.
//
//   a process that leaves, once the graph is closed           its readers let go of what they have not taken (Reader::discard_rest)
//                                                             its pool ends (Pool::end): what nobody holds goes back to the system, what is
//                                                             held goes with its last view (let_go, GivenBack)
//                                                             its loop state becomes "left", and its readers look once more
//   a message published after its reader has looked           the reader's second look finds it, or the writer, whose pool ends after that,
//                                                             finds the reader left
//   a process that has died                                   whoever leaves later lets go for it, and the driver inherits its arena
//
// What is missed, and lasts until the last mapping of the arena goes: the holds of a process that dies after everybody else has left, and
// what is let go of in the arena of one that never leaves. Tearing the graph down again, once they are dead, gets it.
#include <sys/mman.h>

#include <algorithm>

#include "pool.hpp"

namespace raycomm {
namespace {

// The blocks of a process that has died. Its bookkeeping died with it: whatever lies in no block that somebody holds is given back.
void inherit(Mapping& mapping) {
  struct Range {
    uint64_t begin, end;
    uint32_t index;
  };
  std::vector<Range> held;
  uint64_t bytes = 0;
  each_held(mapping, [&](const HeldBlock& block) {
    const uint64_t offset = mapping.block(block.index).offset;
    if (offset < mapping.pool_offset() || offset > mapping.file_bytes() || block.bytes > mapping.file_bytes() - offset) return;
    held.push_back({offset, offset + block.bytes, block.index});
    bytes += block.bytes;
  });
  std::sort(held.begin(), held.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  mapping.header().pool_committed.store(bytes, std::memory_order_relaxed);  // before the first of them can be given back
  uint64_t at = mapping.pool_offset();
  for (const Range& range : held) {
    if (range.begin > at) madvise(mapping.at(at), range.begin - at, MADV_REMOVE);
    at = std::max(at, range.end);
  }
  if (at < mapping.file_bytes()) madvise(mapping.at(at), mapping.file_bytes() - at, MADV_REMOVE);
  for (const Range& range : held) leave_to_holders(mapping, range.index);
}

}  // namespace

void let_go_for_dead(const Neighbourhood& graph) {
  ProcessSet dead{};
  bool any = false;
  graph.each_peer([&](uint32_t process, Mapping&) {
    if (graph.alive(process)) return;
    add_to(dead, process);
    any = true;
  });
  if (!any) return;
  // It reads nothing any more. A forked child of it may: what that inherited was valid for as long as its parent held it.
  const auto release = [&](Mapping& mapping) {
    each_held(mapping, [&](const HeldBlock& block) {
      block.each_holder([&](uint32_t process) {
        if (is_in(dead, process)) let_go(mapping, block.index, process);
      });
    });
  };
  release(graph.own());
  graph.each_peer([&](uint32_t process, Mapping& mapping) {
    release(mapping);
    if (is_in(dead, process) && graph.process() == kDriver) inherit(mapping);
  });
}

// For readers that have left: of messages they have not taken, and so have handed out no view of.
void Pool::let_go_for_left(uint32_t index) {
  const Entry& entry = records_[index];
  if (entry.route == kNoRoute) return;
  const Route& route = routes_[entry.route];
  for (size_t r = 0; r < route.readers.size(); ++r) {
    const uint32_t process = route.readers[r];
    // ORDER leaving (Dekker): the message was published, then we look at the state; the reader sets the state, then looks at the ring.
    if (graph_->peer(process)->header().loop_state.load(std::memory_order_seq_cst) != static_cast<uint32_t>(LoopState::left)) continue;
    if (route.taken[r].value.load(std::memory_order_acquire) <= entry.number) let_go(*own_, index, process);
  }
}

void Pool::end() {
  const std::lock_guard lock(mutex_);
  ended_.store(true, std::memory_order_seq_cst);  // ORDER ended: pairs with the look after publishing in Writer::stage_and_publish
  for (uint32_t index = 0; index < records_.size(); ++index) {
    if (records_[index].state != State::published) continue;
    let_go_for_left(index);
    if (held(index)) leave_to_holders(*own_, index);
  }
  trim_locked();
}

}  // namespace raycomm
