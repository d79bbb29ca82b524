#include "ring.hpp"

#include <cstring>

namespace raycomm {
namespace {
Cursor* cursors_of(RingHeader& ring) { return reinterpret_cast<Cursor*>(reinterpret_cast<unsigned char*>(&ring) + sizeof(RingHeader)); }
unsigned char* slots_of(RingHeader& ring, const RingShape& shape) { return reinterpret_cast<unsigned char*>(cursors_of(ring) + shape.readers); }
}  // namespace

RingWriter::RingWriter(const Neighbourhood& graph, uint32_t channel, const std::vector<uint32_t>& readers, Pool& pool) : own_(graph.own_ref()), ids_(readers) {
  ring_ = &own_->ring(channel, shape_);
  if (readers.size() != shape_.readers) throw ArenaError("the ring was laid out for another number of readers");
  taken_ = cursors_of(*ring_);
  slots_ = slots_of(*ring_, shape_);
  for (uint32_t process : readers) {
    if (process >= kMaxProcesses) throw ArenaError("a graph has at most 256 processes on one machine");
    holders_.add(process);
    readers_.push_back(graph.peer(process));
  }
  route_ = pool.add_route({taken_, &ring_->published.value, channel, readers});
}

void RingWriter::add_laggards(ProcessSet& processes) const {
  for (uint32_t r = 0; r < shape_.readers; ++r)
    if (taken_[r].value.load(std::memory_order_relaxed) + shape_.slots <= published()) add_to(processes, ids_[r]);
}

void RingWriter::count_wait(uint64_t waited_ticks) {
  ring_->published.waits.store(++counted_.waits, std::memory_order_relaxed);
  ring_->published.waited.store(counted_.waited += waited_ticks, std::memory_order_relaxed);
}

void RingReader::count_wait(uint64_t waited_ticks) {
  taken_->waits.store(taken_->waits.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  taken_->waited.store(taken_->waited.load(std::memory_order_relaxed) + waited_ticks, std::memory_order_relaxed);
}

bool RingWriter::has_room() const {
  const uint64_t next = published();
  if (next < known_free_until_) return true;
  uint64_t slowest = UINT64_MAX;
  for (uint32_t r = 0; r < shape_.readers; ++r) {
    // ORDER slot-release: pairs with the store of taken in RingReader::close; what the reader read, we may now overwrite.
    const uint64_t taken = taken_[r].value.load(std::memory_order_seq_cst);
    slowest = std::min(slowest, std::min(taken, next));  // a cursor ahead of ours is nonsense: never trust it further than that
  }
  known_free_until_ = slowest + shape_.slots;
  return next < known_free_until_;
}

void RingWriter::stage(const Outgoing& message, Pool& pool, Staged& staged) const {
  const size_t table = frame_table_offset(message.payload_bytes);
  const size_t count = message.buffers.size();
  size_t frame = count == 0 ? message.payload_bytes : table + count * sizeof(BufferEntry);
  for (const auto& buffer : message.buffers)
    if (buffer.bytes < kBlockThreshold) frame += align_up(buffer.bytes, 8);

  staged.header = SlotHeader{static_cast<uint32_t>(published()), message.kind, message.payload_bytes, static_cast<uint32_t>(count), kInline, 0, 0};
  staged.blocks.clear();
  staged.lent.clear();
  staged.copies.clear();
  staged.copy_bytes = 0;
  staged.bytes = message.payload_bytes;
  staged.pickles = message.pickles;
  try {
    unsigned char* base = inline_begin();
    if (frame > inline_bytes()) {
      staged.header.block_index = pool.acquire(frame);
      staged.blocks.push_back(staged.header.block_index);
      staged.header.block_generation = pool.generation(staged.header.block_index);
      base = pool.bytes(staged.header.block_index);
    }
    if (base != message.payload) {
      staged.copies.push_back({base, message.payload, message.payload_bytes});
      staged.copy_bytes += message.payload_bytes;
    }
    unsigned char* small = base + table + count * sizeof(BufferEntry);
    for (size_t i = 0; i < count; ++i) {
      const auto& buffer = message.buffers[i];
      BufferEntry entry{buffer.bytes, kInline, 0};
      unsigned char* to = small;
      staged.bytes += buffer.bytes;
      if (buffer.bytes < kBlockThreshold) {
        small += align_up(buffer.bytes, 8);
      } else if (pool.claim_lent(buffer.data, buffer.bytes, entry.block_index)) {
        staged.lent.emplace_back(entry.block_index, buffer.bytes);
        entry.block_generation = pool.generation(entry.block_index);
        std::memcpy(base + table + i * sizeof entry, &entry, sizeof entry);
        continue;
      } else {
        entry.block_index = pool.acquire(buffer.bytes);
        staged.blocks.push_back(entry.block_index);
        entry.block_generation = pool.generation(entry.block_index);
        to = pool.bytes(entry.block_index);
      }
      std::memcpy(base + table + i * sizeof entry, &entry, sizeof entry);
      if (buffer.bytes != 0) staged.copies.push_back({to, buffer.data, buffer.bytes});
      staged.copy_bytes += buffer.bytes;
    }
  } catch (...) {
    abandon(staged, pool);
    throw;
  }
}

void RingWriter::abandon(Staged& staged, Pool& pool) const {
  for (uint32_t block : staged.blocks) pool.give_back(block);
  for (const auto& [block, bytes] : staged.lent) pool.unclaim(block, bytes);
  staged.blocks.clear();
  staged.lent.clear();
}

void RingWriter::commit(const Staged& staged, Pool& pool) {
  const uint64_t next = published();
  for (uint32_t block : staged.blocks) pool.publish(block, holders_, route_, next);
  for (const auto& [block, bytes] : staged.lent) pool.publish(block, holders_, route_, next);
  Published& line = ring_->published;
  line.bytes.store(counted_.bytes += staged.bytes, std::memory_order_relaxed);
  if (!staged.blocks.empty() || !staged.lent.empty()) line.in_blocks.store(++counted_.in_blocks, std::memory_order_relaxed);
  if (staged.pickles != 0) line.pickles.store(counted_.pickles += staged.pickles, std::memory_order_relaxed);
  if (staged.header.kind == Kind::failure) line.failures.store(++counted_.failures, std::memory_order_relaxed);
  std::memcpy(slot(next), &staged.header, sizeof staged.header);
  // ORDER publish: everything above is seen by a reader that sees this cursor (RingReader::ready). seq_cst for ORDER parking.
  ring_->published.value.store(next + 1, std::memory_order_seq_cst);
}

void RingWriter::notify() const {
  for (const MappingRef& reader : readers_) reader->ring_bell();
}

RingReader::RingReader(const Neighbourhood& graph, uint32_t writer, uint32_t channel, uint32_t reader)
    : own_(graph.own_ref()), source_(graph.peer(writer)), process_(graph.process()) {
  ring_ = &source_->ring(channel, shape_);
  if (reader >= shape_.readers) throw ArenaError("the ring was laid out for fewer readers");
  taken_ = cursors_of(*ring_) + reader;
  slots_ = slots_of(*ring_, shape_);
  next_ = taken_->value.load(std::memory_order_relaxed);
  scratch_ = std::make_unique<unsigned char[]>(shape_.slot_bytes);
}

bool RingReader::locate(uint32_t index, uint32_t generation, uint64_t bytes, const unsigned char*& data) const {
  if (index >= source_->block_capacity()) return false;
  const BlockHeader& block = source_->block(index);
  const uint64_t offset = block.offset, capacity = block.bytes;  // private copies; checked below
  if (block.generation.load(std::memory_order_relaxed) != generation) return false;
  if (offset < source_->pool_offset() || offset > source_->file_bytes() || capacity > source_->file_bytes() - offset || bytes > capacity) return false;
  data = source_->at(offset);
  return true;
}

void RingReader::open(Incoming& message) {
  const unsigned char* slot = slots_ + (next_ & (shape_.slots - 1)) * shape_.slot_bytes;
  const size_t inline_bytes = shape_.slot_bytes - sizeof(SlotHeader);
  SlotHeader header;
  std::memcpy(&header, slot, sizeof header);
  message.kind = header.kind;
  message.payload = nullptr;
  message.payload_bytes = 0;
  message.buffers.clear();
  message.frame_block = kInline;
  message.problem.clear();
  if (header.sequence != static_cast<uint32_t>(next_)) {
    message.problem = "message " + std::to_string(next_) + " carries number " + std::to_string(header.sequence);
    return;
  }
  if (header.kind != Kind::value && header.kind != Kind::failure) {
    message.problem = "unknown kind " + std::to_string(static_cast<uint32_t>(header.kind));
    return;
  }
  const size_t count = header.buffer_count;
  const size_t table = frame_table_offset(header.payload_bytes);
  const unsigned char* frame = nullptr;
  size_t room = inline_bytes;
  if (header.block_index == kInline) {
    frame = scratch_.get();
  } else {
    // The room of a frame in a block is the block's own size, as recorded in the table.
    if (!locate(header.block_index, header.block_generation, header.payload_bytes, frame)) {
      message.problem = "its frame lies in no block";
      return;
    }
    room = source_->block(header.block_index).bytes;
    if (room > source_->file_bytes() - static_cast<size_t>(frame - source_->at(0))) {
      message.problem = "its frame lies in no block";
      return;
    }
    message.frame_block = header.block_index;
  }
  if (header.payload_bytes > room || (count != 0 && (table > room || count > (room - table) / sizeof(BufferEntry)))) {
    message.problem = "its lengths exceed its frame";
    return;
  }
  size_t at = count == 0 ? header.payload_bytes : table + count * sizeof(BufferEntry);
  if (header.block_index == kInline) std::memcpy(scratch_.get(), slot + sizeof header, at);
  for (size_t i = 0; i < count; ++i) {
    BufferEntry entry;
    std::memcpy(&entry, frame + table + i * sizeof entry, sizeof entry);
    const unsigned char* data = nullptr;
    if (entry.block_index == kInline) {
      if (entry.bytes > room - at || align_up(entry.bytes, 8) > room - at) {
        message.problem = "buffer " + std::to_string(i) + " exceeds its frame";
        return;
      }
      // Small buffers of an inline frame are copied straight from the slot by the decoder; it stays ours until close().
      data = (header.block_index == kInline ? slot + sizeof header : frame) + at;
      at += align_up(entry.bytes, 8);
    } else if (!locate(entry.block_index, entry.block_generation, entry.bytes, data)) {
      message.problem = "buffer " + std::to_string(i) + " lies in no block";
      return;
    }
    message.buffers.push_back({data, entry.bytes, entry.block_index});
  }
  message.payload = frame;
  message.payload_bytes = header.payload_bytes;
}

void RingReader::close(const Incoming& message) {
  if (message.frame_block != kInline) let_go(*source_, message.frame_block, process_);
  ++next_;
  taken_->value.store(next_, std::memory_order_seq_cst);  // ORDER slot-release, and ORDER parking for a writer waiting for room
  source_->ring_bell();
}

void RingReader::discard(const Incoming& message) {
  for (const auto& buffer : message.buffers)
    if (buffer.block != kInline) let_go(*source_, buffer.block, process_);
  close(message);
}

}  // namespace raycomm
