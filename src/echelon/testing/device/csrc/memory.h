// The memory of the device, which the host cannot touch, and pinned memory of the host.
//
// The memory of the device is mapped twice: where tensors say it is, nobody may read or write; at a
// constant distance from there, work of streams does.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

namespace sim::memory {

// Where work finds the memory of a tensor of the device.
void* seen_by_work(const void* pointer);
bool is_device(const void* pointer);
bool is_pinned(const void* pointer);
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
// Hand the memory that starts at a pointer out again only after what a stream has been asked to do
// by the time it is given back. Copies do so with pinned memory, `record_stream` with all.
void use_on(const void* pointer, int line);
void resize(const c10::Storage& storage, size_t nbytes);

struct Stats {
  size_t allocated, peak;  // bytes of tensors
};
Stats stats();
void reset_peak();

}  // namespace sim::memory
