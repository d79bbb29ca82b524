// The Python module raycomm._core: thin bindings, no logic. The stub next to it (_core.pyi) says what each name does.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "endpoint.hpp"
#include "gil.hpp"
#include "inspect.hpp"
#include "pingpong.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace raycomm {
namespace {

// Exports a Storage by the buffer protocol; what a numpy array or the Python codec's values are built on.
struct Buffer {
  Storage* storage;
  bool writable;
  Buffer(Storage* storage, bool writable) : storage(storage), writable(writable) {}
  Buffer(const Buffer&) = delete;
  ~Buffer() { storage->release(); }
};

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  Buffer* buffer = nb::inst_ptr<Buffer>(self);
  return PyBuffer_FillInfo(view, self, buffer->storage->data(), static_cast<Py_ssize_t>(buffer->storage->bytes()), !buffer->writable, flags);
}
PyType_Slot buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

PyObject* make_buffer(Storage* storage, bool writable) {
  return nb::cast(new Buffer(storage, writable), nb::rv_policy::take_ownership).release().ptr();
}

[[noreturn]] void raise() { throw nb::python_error(); }
nb::object owned(PyObject* value) {
  if (!value) raise();
  return nb::steal(value);
}
void check(bool ok) {
  if (!ok) raise();
}

std::span<const unsigned char, 16> nonce_of(const nb::bytes& nonce) {
  if (nonce.size() != 16) throw nb::value_error("a nonce has 16 bytes");
  return std::span<const unsigned char, 16>(reinterpret_cast<const unsigned char*>(nonce.c_str()), 16);
}

std::shared_ptr<Arena> create_arena(uint32_t process, const std::vector<nb::tuple>& rings, uint32_t block_capacity, uint64_t pool_bytes,
                                    uint64_t budget_bytes, const nb::bytes& nonce, double spin_us, double yield_us, double slice_ms, double due_share,
                                    uint32_t processes, uint32_t claims, uint32_t records, uint32_t nodes, bool waker) {
  ArenaShape shape{{}, block_capacity, pool_bytes, budget_bytes, processes, claims, records, nodes, waker};
  for (const nb::tuple& ring : rings)
    shape.rings.push_back({nb::cast<uint32_t>(ring[0]), nb::cast<uint32_t>(ring[1]), nb::cast<uint32_t>(ring[2]), nb::cast<uint32_t>(ring[3])});
  MappingRef own(Mapping::create(shape, nonce_of(nonce)));
  auto graph = std::make_shared<Neighbourhood>(std::move(own), process);
  graph->policy.spin_ns = static_cast<int64_t>(spin_us * 1e3);
  graph->policy.yield_ns = static_cast<int64_t>(yield_us * 1e3);
  graph->policy.slice_ns = static_cast<int64_t>(slice_ms * 1e6);
  graph->policy.due_share = due_share;
  return std::make_shared<Arena>(std::move(graph));
}

void join(Arena& arena, uint32_t driver, const std::vector<std::pair<uint64_t, std::string>>& memory_limits) {
  arena.graph->join(driver);
  std::vector<MemoryLimit> limits;
  for (const auto& [bytes, used] : memory_limits) limits.push_back({bytes, used});
  arena.pool = std::make_shared<Pool>(arena.graph, std::move(limits));
  arena.graph->pool = arena.pool;
}

bool here(const Arena& arena) { return arena.graph->own().made_under() == fork_epoch(); }

// Encodes to (payload, buffers as bytes) without a ring; with decode_value the codec's test surface.
nb::tuple encode_value(nb::handle value) {
  Encoder encoder;
  encoder.reset(nullptr, 0);
  check(encoder.encode(value.ptr()));
  const Outgoing& message = encoder.message();
  nb::list buffers;
  for (const auto& buffer : message.buffers) buffers.append(nb::bytes(buffer.data, buffer.bytes));
  return nb::make_tuple(nb::bytes(message.payload, message.payload_bytes), buffers);
}

nb::object decode_value(const nb::bytes& payload, nb::sequence buffers) {
  Incoming message;
  message.payload = reinterpret_cast<const unsigned char*>(payload.c_str());
  message.payload_bytes = payload.size();
  std::vector<nb::bytes> kept;
  for (nb::handle buffer : buffers) kept.push_back(nb::cast<nb::bytes>(buffer));
  for (const nb::bytes& buffer : kept) message.buffers.push_back({reinterpret_cast<const unsigned char*>(buffer.c_str()), buffer.size(), kInline});
  Decoder decoder(make_buffer);
  return owned(decoder.decode_copy(message));
}

PyObject* make_exception(nb::module_& m, const char* name, const char* doc, PyObject* base) {
  const std::string qualified = std::string("raycomm._core.") + name;
  PyObject* type = PyErr_NewExceptionWithDoc(qualified.c_str(), doc, base, nullptr);
  if (!type) raise();
  m.attr(name) = nb::borrow(type);
  return type;
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "Native part of raycomm: atomics, futex waits, rings, block pool and the codec's fast path.";
  nb::set_leak_warnings(false);  // objects of loops parked at interpreter exit are freed with the process
  install_fork_counter();
  g_timed_out = make_exception(m, "TimedOut", "The deadline passed; nothing was read or written.", PyExc_Exception);
  g_closed = make_exception(m, "Closed", "(reason, process): the arena was closed.", PyExc_Exception);
  g_pool_full = make_exception(m, "PoolFull", "(wanted, free, limit, errno, {process: bytes held}, shortage, others' bytes): no block can be had, and waiting will not help.", PyExc_Exception);
  g_pool_busy = make_exception(m, "PoolBusy", "Messages on their way hold the memory: take finished results aside, then try again.", PyExc_Exception);
  g_overfull = make_exception(m, "Overfull", "As many results as allowed are kept already.", PyExc_Exception);
  g_misuse = make_exception(m, "Misuse", "Two threads on one endpoint, or use after fork.", PyExc_RuntimeError);
  nb::exception<ArenaError>(m, "ArenaError", PyExc_OSError);

  m.attr("LAYOUT_VERSION") = kLayoutVersion;
  m.attr("BLOCK_THRESHOLD") = kBlockThreshold;
  m.attr("SLOT_HEADER_BYTES") = sizeof(SlotHeader);
  m.attr("CLOSED_TEARDOWN") = static_cast<uint32_t>(Closed::teardown);
  m.attr("CLOSED_PEER_DIED") = static_cast<uint32_t>(Closed::peer_died);
  m.attr("CLOSED_FAILED") = static_cast<uint32_t>(Closed::failed);
  m.attr("NO_CALL") = ReaderRole::kNoCall;
  for (const auto& [name, value] : {std::pair("IDLE", Activity::idle), std::pair("READING", Activity::reading), std::pair("COMPUTING", Activity::computing),
                                    std::pair("WRITING", Activity::writing), std::pair("MEMORY", Activity::memory), std::pair("ARRIVING", Activity::arriving)})
    m.attr(name) = static_cast<uint32_t>(value);
  for (const auto& [name, value] : {std::pair("SHORTAGE_PINNED", Shortage::pinned), std::pair("SHORTAGE_CIRCULAR", Shortage::circular),
                                    std::pair("SHORTAGE_TOO_LARGE", Shortage::too_large)})
    m.attr(name) = static_cast<uint32_t>(value);
  m.attr("LOOP_NONE") = static_cast<uint32_t>(LoopState::none);
  m.attr("LOOP_RUNNING") = static_cast<uint32_t>(LoopState::running);
  m.attr("LOOP_LEFT") = static_cast<uint32_t>(LoopState::left);
  nb::enum_<AfterClose>(m, "AfterClose").value("DRAIN", AfterClose::drain).value("LEAVE", AfterClose::leave);
  m.def("layout", &layout);
  m.def("encode", &encode_value, "value"_a.none());
  m.def("decode", &decode_value, "payload"_a, "buffers"_a);
  m.def("stop_others", &GilRelease::stop_others);
  // Exit hooks run last in, first out: graphs are compiled after this import, so theirs run before this one.
  nb::module_::import_("atexit").attr("register")(m.attr("stop_others"));

  nb::class_<Buffer>(m, "Buffer", nb::type_slots(buffer_slots));

  nb::class_<Arena>(m, "Arena")
      .def_static("create", &create_arena, nb::kw_only(), "process"_a, "rings"_a, "block_capacity"_a, "pool_bytes"_a, "budget_bytes"_a, "nonce"_a,
                  "spin_us"_a, "yield_us"_a, "slice_ms"_a, "due_share"_a = 0.0, "processes"_a = 0, "claims"_a = 0, "records"_a = 0, "nodes"_a = 0,
                  "waker"_a = false)
      .def_prop_ro("process", [](const Arena& a) { return a.graph->process(); })
      .def_prop_ro("fd", [](const Arena& a) { return a.graph->own().fd(); })
      .def("attach", [](Arena& a, uint32_t process, int pid, int fd, const nb::bytes& nonce) {
        if (process >= kMaxProcesses) throw nb::value_error("process index out of range");
        a.graph->add_peer(process, MappingRef(Mapping::attach(pid, fd, nonce_of(nonce))));
      }, "process"_a, "pid"_a, "fd"_a, "nonce"_a)
      .def("join", &join, "driver"_a, "memory_limits"_a = std::vector<std::pair<uint64_t, std::string>>())
      .def("close", [](const Arena& a, uint32_t reason, uint32_t process) { a.graph->close_all(static_cast<Closed>(reason), process); }, "reason"_a,
           "process"_a)
      .def_prop_ro("closed", [](const Arena& a) {
        const uint64_t closed = a.graph->closed();
        return std::pair<uint32_t, uint32_t>(static_cast<uint32_t>(closed), static_cast<uint32_t>(closed >> 32));
      })
      .def("closed_at", [](const Arena& a, uint32_t process) {
        const uint64_t closed = a.graph->peer(process)->header().closed.load(std::memory_order_seq_cst);
        return std::pair<uint32_t, uint32_t>(static_cast<uint32_t>(closed), static_cast<uint32_t>(closed >> 32));
      }, "process"_a)
      .def("alive", [](const Arena& a, uint32_t process) { return a.graph->alive(process); }, "process"_a)
      .def("ended_with", [](const Arena& a, uint32_t process) -> nb::object {
        const std::optional<int> status = a.graph->ended_with(process);
        return status ? nb::object(nb::int_(*status)) : nb::none();
      }, "process"_a)
      .def("look_for_dead", [](const Arena& a) { return a.graph->look_for_dead(); })
      .def("doing", &doing, "process"_a)
      .def("records", &records, "process"_a, "last"_a)
      .def("node_counters", &node_counters, "process"_a)
      .def("channel_counters", &channel_counters, "writer"_a, "channel"_a)
      .def("held_blocks", &held_blocks, "process"_a)
      .def("committed", [](const Arena& a, uint32_t process) { return a.graph->peer(process)->header().pool_committed.load(std::memory_order_relaxed); },
           "process"_a)
      .def("rest", [](const Arena& a) { a.graph->board().set(Activity::idle, 0, ticks()); })
      // Others see that this process waits for what comes beside a channel's message, over a link. `mark` or `rest` ends it.
      .def("await_transfer", [](const Arena& a, uint32_t channel, uint32_t writer) {
        ProcessSet peers{};
        add_to(peers, writer);
        a.graph->board().close_call(ticks());
        a.graph->board().set_waiting(Activity::arriving, channel, peers, ticks());
      }, "channel"_a, "writer"_a)
      .def("mark", [](const Arena& a, uint32_t subject) {
        const uint64_t now = ticks();
        a.graph->board().close_call(now);
        a.graph->board().open_call(subject, now);
      }, "subject"_a)
      .def_prop_ro("waker", [](const Arena& a) { return a.graph->own().waker_end(); })
      // In a forked child all of these belong to the parent.
      .def("arm", [](const Arena& a) { if (here(a)) arm(a.graph->own().header().doorbell); })
      .def("disarm", [](const Arena& a) { if (here(a)) disarm(a.graph->own().header().doorbell); })
      .def("cancel", [](const Arena& a, uint64_t execution) { return here(a) && cancel_execution(*a.graph->driver(), execution); }, "execution"_a)
      .def("wait_results", [](Arena& a, const std::vector<nb::tuple>& results, size_t wanted, double timeout) {
        std::vector<std::pair<const Reader*, uint64_t>> rows;
        for (const nb::tuple& row : results) rows.emplace_back(nb::cast<const Reader*>(row[0]), nb::cast<uint64_t>(row[1]));
        const int result = a.wait_results(rows, wanted, timeout);
        check(result >= 0);
        return result == 1;
      }, "results"_a, "wanted"_a, "timeout"_a)
      .def("lend", [](Arena& a, uint64_t bytes, double timeout, const nb::tuple& outputs) {
        if (!a.pool) throw ArenaError("the arena has no pool yet: call join first");
        if (!in_its_process(*a.graph)) raise();
        if (const uint64_t closed = a.graph->closed(); closed != 0) raise_closed(closed), raise();
        unsigned char* data = nullptr;
        const int64_t deadline = deadline_after(timeout);
        std::vector<const Reader*> readers;
        for (nb::handle output : outputs) readers.push_back(nb::cast<const Reader*>(output));
        const auto result_waits = [&] {
          return std::any_of(readers.begin(), readers.end(), [](const Reader* reader) { return reader->published() > reader->taken(); });
        };
        for (MemoryWait wait(*a.graph, *a.pool);;) {
          try {
            Lease* lease = a.pool->lend(bytes, data);
            wait.over();
            return nb::steal(make_buffer(Storage::leased(lease, data, bytes), true));
          } catch (const PoolExhausted& report) {
            if (!wait.step(report, deadline, result_waits)) raise();
            if (result_waits()) {
              PyErr_SetNone(g_pool_busy);
              raise();
            }
          }
        }
      }, "bytes"_a, "timeout"_a = -1.0, "outputs"_a = nb::tuple())
      .def("loop_state", [](const Arena& a, uint32_t process) { return a.graph->peer(process)->header().loop_state.load(std::memory_order_acquire); },
           "process"_a)
      .def("set_loop_state", [](const Arena& a, uint32_t state, uint32_t watcher) {
        if (a.graph->own().made_under() != fork_epoch()) return;
        a.graph->own().header().loop_state.store(state, std::memory_order_seq_cst);  // ORDER parking: Arena::wait_left looks at it; ORDER leaving
        a.graph->peer(watcher)->ring_bell();
      }, "state"_a, "watcher"_a)
      .def("wait_left", [](Arena& a, const std::vector<uint32_t>& processes, double seconds) {
        const int result = a.wait_left(processes, seconds);
        check(result >= 0);
        return result == 1;
      }, "processes"_a, "timeout"_a)
      .def("end", [](const Arena& a) {
        if (!here(a)) return;
        GilRelease released;
        let_go_for_dead(*a.graph);
        if (a.pool) a.pool->end();
      })
      .def_prop_ro("pool_in_use", [](const Arena& a) { return a.pool && here(a) ? a.pool->in_use() : 0; })
      .def_prop_ro("pool_committed", [](const Arena& a) { return a.pool ? a.pool->committed() : 0; })
      .def_prop_ro("budget_used", [](const Arena& a) { return a.graph->own().header().budget_used.load(std::memory_order_relaxed); });

  nb::class_<Writer>(m, "Writer")
      .def("__init__", [](Writer* self, const Arena& arena, const std::vector<nb::tuple>& channels) {
        std::vector<WriterChannel> edges;
        for (const nb::tuple& row : channels)
          edges.push_back({nb::cast<uint32_t>(row[0]), nb::cast<std::vector<uint32_t>>(row[1]), nb::len(row) < 3 || nb::cast<bool>(row[2])});
        new (self) Writer(arena, edges);
      }, "arena"_a, "channels"_a)
      .def("write", [](Writer& w, nb::handle value, double timeout) {
        PyObject* values[1] = {value.ptr()};
        check(w.write(values, 1, timeout));
      }, "value"_a.none(), "timeout"_a = -1.0)
      .def("write_all", [](Writer& w, const nb::tuple& values, double timeout) {
        check(w.write(PySequence_Fast_ITEMS(values.ptr()), static_cast<size_t>(PyTuple_GET_SIZE(values.ptr())), timeout));
      }, "values"_a, "timeout"_a = -1.0)
      .def("submit", [](Writer& w, const nb::tuple& values, nb::handle ref_type, nb::handle graph, const nb::tuple& queues, nb::handle pending,
                        const nb::tuple& outputs, uint64_t in_flight_limit, double timeout) {
        if (!PyType_Check(ref_type.ptr())) throw nb::type_error("ref_type must be a class");
        std::vector<const Reader*> readers;
        readers.reserve(outputs.size());
        for (nb::handle output : outputs) readers.push_back(nb::cast<const Reader*>(output));
        return owned(w.submit(PySequence_Fast_ITEMS(values.ptr()), static_cast<size_t>(PyTuple_GET_SIZE(values.ptr())),
                              reinterpret_cast<PyTypeObject*>(ref_type.ptr()), graph.ptr(), queues.ptr(), pending.ptr(), readers, in_flight_limit,
                              timeout));
      }, "values"_a, "ref_type"_a, "graph"_a, "queues"_a, "pending"_a, "outputs"_a, "in_flight_limit"_a, "timeout"_a)
      .def("write_failure", [](Writer& w, nb::handle payload, nb::handle buffers, double timeout) {
        check(w.write_failure(payload.ptr(), buffers.ptr(), timeout));
      }, "payload"_a, "buffers"_a, "timeout"_a = -1.0)
      .def_prop_ro("published", &Writer::published);

  nb::class_<Reader>(m, "Reader")
      .def("__init__", [](Reader* self, const Arena& arena, uint32_t writer, uint32_t channel, uint32_t index, AfterClose after_close, uint32_t subject,
                          bool first, bool claims, bool share_tensors) {
        new (self) Reader(arena, writer, channel, index, {after_close, subject, first, claims, share_tensors}, make_buffer);
      }, "arena"_a, "writer"_a, "channel"_a, "index"_a, "after_close"_a, "subject"_a = ReaderRole::kNoCall, nb::kw_only(), "first"_a = false,
           "claims"_a = false, "share_tensors"_a = false)
      .def("read", [](Reader& r, double timeout) { return owned(r.read(timeout)); }, "timeout"_a = -1.0)
      .def("fetch", [](Reader& r, nb::handle ref, nb::dict results, nb::set unwanted, uint64_t index, size_t limit, double timeout) {
        check(r.fetch(ref.ptr(), results.ptr(), unwanted.ptr(), index, limit, timeout));
      }, "ref"_a.none(), "results"_a, "unwanted"_a, "index"_a, "limit"_a, "timeout"_a)
      .def("skip", [](Reader& r, double timeout) { check(r.skip(timeout)); }, "timeout"_a = -1.0)
      .def("discard_rest", [](Reader& r, double timeout) { check(r.discard_rest(timeout)); }, "timeout"_a)
      .def_prop_ro("ready", &Reader::ready)
      .def_prop_ro("published", &Reader::published)
      .def_prop_ro("taken", &Reader::taken);

  nb::class_<PingPong>(m, "PingPong")
      .def(nb::init<uint32_t, double, double, bool>(), "parties"_a, "spin_us"_a, "yield_us"_a, "slices"_a = true)
      .def_prop_ro("fd", &PingPong::fd)
      .def_static("attach", [](int pid, int fd, double spin_us, double yield_us, bool slices) {
        return PingPong::attach(pid, fd, spin_us, yield_us, slices).release();
      }, nb::rv_policy::take_ownership, "pid"_a, "fd"_a, "spin_us"_a, "yield_us"_a, "slices"_a = true)
      .def("rally", [](PingPong& p, uint32_t party, uint32_t other, bool serves, uint64_t rounds, uint32_t pauses, uint64_t seed, double timeout) {
        GilRelease released;
        return p.rally(party, other, serves, rounds, pauses, seed, static_cast<int64_t>(timeout * 1e9));
      }, "party"_a, "other"_a, "serves"_a, "rounds"_a, "pauses"_a, "seed"_a, "timeout"_a)
      .def("wait", [](PingPong& p, uint32_t party, uint64_t value, double timeout) {
        bool ok;
        {
          GilRelease released;
          ok = p.wait(party, value, deadline_after(timeout));
        }
        return ok;
      }, "party"_a, "value"_a, "timeout"_a)
      .def("post", &PingPong::post, "party"_a, "value"_a);
}

}  // namespace raycomm
