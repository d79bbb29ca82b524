// Both ways of copying into a block give the same bytes and touch no others, whichever of them this processor takes.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "copy.hpp"

using namespace raycomm;

namespace {

constexpr size_t kMost = 200'000, kGuard = 128;

template <class Copy>
void check(const char* name, const Copy& copy, size_t bytes, size_t to_offset, size_t from_offset, std::mt19937& random) {
  alignas(64) static unsigned char block[kMost + 2 * kGuard];
  static std::vector<unsigned char> source(kMost + kGuard);
  for (unsigned char& byte : source) byte = static_cast<unsigned char>(random());
  std::memset(block, 0xA5, sizeof block);
  unsigned char* to = block + kGuard + to_offset;
  copy(to, source.data() + from_offset, bytes);
  bool right = std::memcmp(to, source.data() + from_offset, bytes) == 0;
  for (const unsigned char* at = block; at < block + sizeof block; ++at) right = right && ((at >= to && at < to + bytes) || *at == 0xA5);
  if (right) return;
  std::fprintf(stderr, "FAILED: %s of %zu bytes from offset %zu to %zu\n", name, bytes, from_offset, to_offset);
  std::exit(1);
}

}  // namespace

int main() {
  const unsigned seed = std::random_device{}();
  std::printf("seed %u\n", seed);
  std::mt19937 random(seed);
  std::vector<size_t> sizes{0, 1, 15, 16, 63, 64, 65, 127, 128, kStreamFrom - 1, kStreamFrom, kStreamFrom + 1, kStreamFrom + 63, kMost};
  for (int i = 0; i < 50; ++i) sizes.push_back(random() % kMost);
  for (const size_t bytes : sizes) {
    const size_t from_offset = random() % 64;
    check("bulk_copy", bulk_copy, bytes, 0, from_offset, random);
    check("bulk_copy", bulk_copy, bytes, random() % 64, from_offset, random);
#if defined(__SSE2__)
    check("streaming_copy", streaming_copy, bytes, random() % 4 * 16, from_offset, random);
#endif
  }
  std::puts("copies give what they were given");
  return 0;
}
