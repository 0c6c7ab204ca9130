// What the program has asked of the device, in order: the input of the detector, which is Python.
//
// It is written when work is issued, so it does not depend on when work runs.

#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace sim::journal {

constexpr int HOST = -1;  // the line of all threads of the host

enum class Kind : int {
  Operation,  // on `line`, with accesses
  Record,     // event `number` is now of `line`
  Wait,       // `line` waits for event `number`
  HostWait,   // the host waits for event `number`
  HostLine,   // the host waits for all of `line`
  HostAll,    // the host waits for all lines
  Allocate,   // memory `number` of `nbytes`, of the pool of `line`, or of the host
  Free,       // memory `number`
  Outlives,   // memory `number` is used on `line`, too
  Forget,     // event `number` is not waited for any more
};

// The bytes of a tensor: of a memory, from an offset, with sizes and strides in elements.
struct Access {
  uint64_t memory;
  int64_t offset;
  int64_t itemsize;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  bool writes;
};

struct Entry {
  Kind kind;
  int line;
  uint64_t number;
  uint64_t nbytes;
  uint64_t stack;
  std::string name;
  std::vector<Access> accesses;
};

// A frame of a stack: file, function, line.
struct Frame {
  std::string file;
  std::string function;
  int line;
};

void turn_on(bool on);
bool is_on();
std::vector<Entry> take();
std::vector<Frame> frames_of(uint64_t stack);
// Leave out the waits that are issued in these lines: of each, the file and the number. They are
// carried out all the same, so the program goes on with right values.
void drop(std::set<std::pair<std::string, int>> lines);

// Remember where this thread is. Called without the lock of the device.
uint64_t here();

void operation(const char* name, int line, std::vector<Access> accesses, uint64_t stack);
uint64_t record(int line);
// An event that was recorded anew, or destroyed, which garbage may be in any thread.
void forget(uint64_t event);
void waits(int line, uint64_t event);
void host_waits(uint64_t event);
void host_waits_for_line(int line);
void host_waits_for_all();
void allocated(const void* start, size_t nbytes, int line);
void freed(const void* start);
void outlives(const void* start, int line);
// The memory that a pointer lies in: its number and the offset; number 0 if it is none of ours.
std::pair<uint64_t, int64_t> memory_of(const void* pointer);

}  // namespace sim::journal
