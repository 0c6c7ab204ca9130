#include "memory.h"
#include "journal.h"
#include "streams.h"

#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace sim::memory {
namespace {

constexpr size_t RESERVED = size_t(1) << 40;  // of addresses; pages come when they are written
constexpr size_t ROUND = 512;                 // what CUDA's allocator rounds to
constexpr uint8_t POISON = 0xFF;              // every float of it is not a number

char* shown = nullptr;  // of tensors of the device
char* seen = nullptr;   // the same memory, for work
char* pinned = nullptr;
size_t used = 0;
size_t pinned_used = 0;

void map_all() {
  if (shown != nullptr) {
    return;
  }
  int file = memfd_create("simulated_device", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, RESERVED) == 0, "the memory of the simulated device");
  auto map = [](int protection, int flags, int file) {
    void* start = mmap(nullptr, RESERVED, protection, flags | MAP_NORESERVE, file, 0);
    TORCH_CHECK(start != MAP_FAILED, "no addresses for the memory of the simulated device");
    return static_cast<char*>(start);
  };
  seen = map(PROT_READ | PROT_WRITE, MAP_SHARED, file);
  pinned = map(PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  shown = map(PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  close(file);
}

size_t rounded(size_t nbytes) {
  return std::max<size_t>((nbytes + ROUND - 1) / ROUND, 1) * ROUND;
}

struct Block {
  size_t nbytes;     // as it was asked for
  size_t room;
  int line;
  std::vector<int> others;  // of `record_stream`
};

// Memory that was given back, and what has to be done before somebody else gets it.
struct Free {
  char* start;
  std::vector<Point> points;
};

std::unordered_map<const void*, Block> blocks;
// By stream and size, blocks that are free: the one that was freed last is used first.
std::map<std::pair<int, size_t>, std::vector<Free>> pools;
size_t allocated = 0;
size_t peak = 0;

// Memory of a pool that may be handed out again; null if there is none.
char* taken(int line, size_t room) {
  auto& pool = pools[{line, room}];
  for (size_t i = pool.size(); i-- > 0;) {
    auto& points = pool[i].points;
    if (std::all_of(points.begin(), points.end(), is_done)) {
      char* start = pool[i].start;
      pool.erase(pool.begin() + static_cast<std::ptrdiff_t>(i));
      return start;
    }
  }
  return nullptr;
}

// What was dropped and is not in its pool yet.
std::mutex dropping;
std::vector<void*> dropped;

// Under the lock of the device.
void return_dropped() {
  std::vector<void*> pointers;
  {
    std::lock_guard guard(dropping);
    pointers.swap(dropped);
  }
  for (void* pointer : pointers) {
    auto block = blocks.find(pointer);
    auto& [nbytes, room, line, others] = block->second;
    allocated -= line == journal::HOST ? 0 : nbytes;
    journal::freed(pointer);
    std::vector<Point> points;
    for (int other : others) {
      points.push_back(now(other));
    }
    pools[{line, room}].push_back({static_cast<char*>(pointer), std::move(points)});
    blocks.erase(block);
  }
}

// Garbage is collected in any thread, also in one that the holder of the lock waits for: so this
// never waits, and what it cannot return at once returns before the next memory is handed out.
void give_back(void* pointer) {
  if (pointer == nullptr) {
    return;
  }
  {
    std::lock_guard guard(dropping);
    dropped.push_back(pointer);
  }
  if (try_lock()) {
    return_dropped();
    unlock();
  }
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    c10::Device device = the_device();
    if (nbytes == 0) {
      return {nullptr, nullptr, &give_back, device};
    }
    Locked locked;
    return_dropped();
    map_all();
    int line = current_line();
    size_t room = rounded(nbytes);
    char* start = taken(line, room);
    if (start == nullptr) {
      TORCH_CHECK(used + room <= RESERVED, "the simulated device has no memory left");
      start = shown + used;
      used += room;
    }
    blocks[start] = {nbytes, room, line, {}};
    allocated += nbytes;
    peak = std::max(peak, allocated);
    journal::allocated(start, nbytes, line);
    void* target = seen_by_work(start);
    issue(line, [target, nbytes] {
      std::memset(target, POISON, nbytes);
      return true;
    });
    return {start, start, &give_back, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "the memory of the simulated device is copied by its streams only");
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    c10::Device device(c10::DeviceType::CPU);
    if (nbytes == 0) {
      return {nullptr, nullptr, &give_back, device};
    }
    Locked locked;
    return_dropped();
    map_all();
    size_t room = rounded(nbytes);
    char* start = taken(journal::HOST, room);
    if (start == nullptr) {
      TORCH_CHECK(pinned_used + room <= RESERVED, "no pinned memory is left");
      start = pinned + pinned_used;
      pinned_used += room;
    }
    blocks[start] = {nbytes, room, journal::HOST, {}};
    journal::allocated(start, nbytes, journal::HOST);
    return {start, start, &give_back, device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }
};

DeviceAllocator of_device;
PinnedAllocator of_host;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &of_device);

}  // namespace

void* seen_by_work(const void* pointer) {
  return pointer == nullptr ? nullptr : seen + (static_cast<const char*>(pointer) - shown);
}

bool is_device(const void* pointer) {
  auto at = static_cast<const char*>(pointer);
  return shown != nullptr && at >= shown && at < shown + RESERVED;
}

bool is_pinned(const void* pointer) {
  auto at = static_cast<const char*>(pointer);
  return pinned != nullptr && at >= pinned && at < pinned + pinned_used;
}

c10::Allocator* device_allocator() {
  return &of_device;
}

c10::Allocator* pinned_allocator() {
  return &of_host;
}

void resize(const c10::Storage& storage, size_t nbytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "a storage that cannot be resized");
  auto memory = of_device.allocate(nbytes);
  size_t kept = std::min<size_t>(nbytes, impl->nbytes());
  if (kept > 0) {
    Locked locked;
    void* target = seen_by_work(memory.get());
    void* source = seen_by_work(impl->data());
    issue(current_line(), [=] {
      std::memcpy(target, source, kept);
      return true;
    });
  }
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(nbytes);
}

void use_on(const void* pointer, int line) {
  Locked locked;
  auto block = blocks.find(pointer);
  if (block != blocks.end() && block->second.line != line) {
    block->second.others.push_back(line);
    journal::outlives(pointer, line);
  }
}

Stats stats() {
  Locked locked;
  return_dropped();
  return {allocated, peak};
}

void reset_peak() {
  Locked locked;
  return_dropped();
  peak = allocated;
}

}  // namespace sim::memory
