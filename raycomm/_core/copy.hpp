// Copying bulk bytes into a block that another core will read: with streaming (non-temporal) stores or ordinary ones, by processor.
//
// With ordinary ones the writer must first take each line away from the core that read the block's last contents, and the reader then
// fetches it from the writer's cache. Streaming goes by way of memory. Round trip of two copies of 192 KiB, block reused at once: on an AMD
// EPYC 16 to 18 us streaming against 26 (96 where the two cores share no cache); on an Intel Xeon (family 6, model 207) 48 against 32. Lost on
// AMD: prefetching for write, four interleaved streams, taking turns among four blocks (13 us at best, 80 at worst). Lost on Intel: prefetching
// for write (30 us, but 16 MiB no faster), `cldemote` after each line (62), AVX-512 (39), `rep movsb` (32). docs/performance.md has the tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace raycomm {

#if defined(__SSE2__)
// `to` must be a multiple of 16.
inline void streaming_copy(void* to, const void* from, size_t bytes) {
  auto* target = static_cast<__m128i*>(to);
  const auto* source = static_cast<const __m128i*>(from);
  const size_t lines = bytes / 64;
  for (size_t i = 0; i < lines; ++i, target += 4, source += 4) {
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1), c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(target, source, bytes % 64);
  _mm_sfence();  // streaming stores are not ordered by the release store that publishes them
}
#endif

inline constexpr size_t kStreamFrom = 32768;

inline void bulk_copy(void* to, const void* from, size_t bytes) {
#if defined(__SSE2__)
  if (bytes >= kStreamFrom && reinterpret_cast<uintptr_t>(to) % 16 == 0 && !__builtin_cpu_is("intel")) return streaming_copy(to, from, bytes);
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace raycomm
