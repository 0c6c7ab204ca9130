#include "journal.h"
#include "streams.h"

#include <Python.h>

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>

namespace sim::journal {
namespace {

constexpr int MOST_FRAMES = 64;

struct RawFrame {
  PyCodeObject* code;
  int instruction;
};

struct Stack {
  std::vector<RawFrame> frames;
};

bool on = false;
std::vector<Entry> entries;
std::vector<Stack> stacks(1);  // number 0 is empty
std::unordered_map<std::string, uint64_t> numbers;
std::unordered_map<uint64_t, uint64_t> of_forward;  // by sequence number of autograd
std::map<const char*, std::pair<size_t, uint64_t>> memories;  // by start: length, number
uint64_t next_event = 1;
std::mutex forgetting;
std::vector<uint64_t> forgotten;
uint64_t next_memory = 1;
std::set<std::pair<std::string, int>> dropped;  // lines whose waits are left out

bool is_dropped(uint64_t stack) {
  if (dropped.empty()) {
    return false;
  }
  auto frames = frames_of(stack);
  return std::any_of(frames.begin(), frames.end(), [](const Frame& frame) {
    return dropped.count({frame.file, frame.line}) != 0;
  });
}

void add(Kind kind, int line, uint64_t number) {
  if (on) {
    entries.push_back({kind, line, number, 0, 0, "", {}});
  }
}

// A wait, unless this is the place at which waits are left out.
void add_wait(Kind kind, int line, uint64_t event) {
  if (!on) {
    return;
  }
  uint64_t stack = here();
  if (!is_dropped(stack)) {
    entries.push_back({kind, line, event, 0, stack, "", {}});
  }
}

// With the GIL.
uint64_t stack_of_thread() {
  std::vector<RawFrame> frames;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame != nullptr && frames.size() < MOST_FRAMES) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    frames.push_back({code, PyFrame_GetLasti(frame)});
    Py_DECREF(code);  // the frame has it
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  if (frames.empty()) {
    return 0;
  }
  std::string key(reinterpret_cast<const char*>(frames.data()), frames.size() * sizeof(RawFrame));
  auto [found, is_new] = numbers.emplace(std::move(key), stacks.size());
  if (is_new) {
    for (auto& each : frames) {
      Py_INCREF(each.code);  // for good, or another code could get its address
    }
    stacks.push_back({std::move(frames)});
  }
  return found->second;
}

}  // namespace

void turn_on(bool value) {
  on = value;
}

bool is_on() {
  return on;
}

std::vector<Entry> take() {
  Locked locked;
  auto taken = std::exchange(entries, {});
  std::lock_guard guard(forgetting);
  for (uint64_t event : std::exchange(forgotten, {})) {
    taken.push_back({Kind::Forget, HOST, event, 0, 0, "", {}});
  }
  return taken;
}

void drop(std::set<std::pair<std::string, int>> lines) {
  dropped = std::move(lines);
}

uint64_t here() {
  if (!Py_IsInitialized()) {
    return 0;
  }
  auto node = torch::autograd::get_current_node();
  auto state = PyGILState_Ensure();
  uint64_t stack = stack_of_thread();
  if (node && stack == 0) {  // of a thread of autograd: where the forward was
    auto found = of_forward.find(node->sequence_nr());
    stack = found == of_forward.end() ? 0 : found->second;
  } else if (!node) {
    of_forward[at::sequence_number::peek() - 1] = stack;
  }
  PyGILState_Release(state);
  return stack;
}

std::vector<Frame> frames_of(uint64_t stack) {
  std::vector<Frame> frames;
  auto state = PyGILState_Ensure();
  for (auto& raw : stacks.at(stack).frames) {
    frames.push_back(
        {PyUnicode_AsUTF8(raw.code->co_filename),
         PyUnicode_AsUTF8(raw.code->co_qualname),
         PyCode_Addr2Line(raw.code, raw.instruction)});
  }
  PyGILState_Release(state);
  return frames;
}

void operation(const char* name, int line, std::vector<Access> accesses, uint64_t stack) {
  if (on) {
    entries.push_back({Kind::Operation, line, 0, 0, stack, name, std::move(accesses)});
  }
}

uint64_t record(int line) {
  add(Kind::Record, line, next_event);
  return next_event++;
}

void forget(uint64_t event) {
  std::lock_guard guard(forgetting);
  if (on) {
    forgotten.push_back(event);
  }
}

void waits(int line, uint64_t event) {
  add_wait(Kind::Wait, line, event);
}

void host_waits(uint64_t event) {
  add_wait(Kind::HostWait, HOST, event);
}

void host_waits_for_line(int line) {
  add_wait(Kind::HostLine, line, 0);
}

void host_waits_for_all() {
  add_wait(Kind::HostAll, HOST, 0);
}

void allocated(const void* start, size_t nbytes, int line) {
  memories[static_cast<const char*>(start)] = {nbytes, next_memory};
  uint64_t stack = on ? here() : 0;
  if (on) {
    entries.push_back({Kind::Allocate, line, next_memory, nbytes, stack, "allocation", {}});
  }
  next_memory++;
}

void freed(const void* start) {
  auto found = memories.find(static_cast<const char*>(start));
  if (found != memories.end()) {
    add(Kind::Free, HOST, found->second.second);
    memories.erase(found);
  }
}

void outlives(const void* start, int line) {
  auto [number, offset] = memory_of(start);
  if (number != 0) {
    add(Kind::Outlives, line, number);
  }
}

std::pair<uint64_t, int64_t> memory_of(const void* pointer) {
  auto at = static_cast<const char*>(pointer);
  auto next = memories.upper_bound(at);
  if (next == memories.begin()) {
    return {0, 0};
  }
  auto found = std::prev(next);
  auto offset = at - found->first;
  if (offset >= static_cast<int64_t>(std::max<size_t>(found->second.first, 1))) {
    return {0, 0};
  }
  return {found->second.second, offset};
}

}  // namespace sim::journal
