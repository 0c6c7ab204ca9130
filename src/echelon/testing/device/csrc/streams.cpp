#include "streams.h"
#include "journal.h"
#include "memory.h"

#include <Python.h>

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <exception>
#include <optional>
#include <random>
#include <thread>

namespace sim {
namespace {

struct Item {
  Step step;
  std::optional<Point> after;  // without a step: all that follows waits for this
};

struct Queue {
  std::deque<Item> items;
  uint64_t issued = 0;
  uint64_t done = 0;
};

std::recursive_mutex lock;
std::vector<Queue> queues(1);
Order order = Order::Eager;
std::mt19937_64 draws;
std::exception_ptr deferred;
bool is_running = false;  // work never runs inside of work
thread_local int current = 0;

bool is_ready(const Item& item) {
  return !item.after || is_done(*item.after);
}

// Run the first item of a stream, if it may run; returns whether it is done.
bool advance(Queue& queue) {
  if (queue.items.empty() || !is_ready(queue.items.front())) {
    return false;
  }
  // A deque does not move its items while others are added at its end.
  Item& item = queue.items.front();
  bool done = true;
  if (item.step) {
    is_running = true;
    try {
      done = item.step();
    } catch (...) {
      if (!deferred) {
        deferred = std::current_exception();
      }
    }
    is_running = false;
  }
  if (done) {
    queue.items.pop_front();
    queue.done += 1;
  }
  return done;
}

bool advance_any() {
  bool any = false;
  for (size_t i = 0; i < queues.size(); i++) {
    any = advance(queues[i]) || any;
  }
  return any;
}

// The streams whose first item may run now.
std::vector<size_t> ready() {
  std::vector<size_t> found;
  for (size_t i = 0; i < queues.size(); i++) {
    if (!queues[i].items.empty() && is_ready(queues[i].items.front())) {
      found.push_back(i);
    }
  }
  return found;
}

// After something was issued: what the order lets run.
void run_some() {
  if (is_running) {
    return;
  }
  if (order == Order::Eager) {
    while (advance_any()) {
    }
  } else if (order == Order::Random) {
    for (auto left = draws() % 4; left > 0; left--) {
      auto found = ready();
      if (found.empty()) {
        return;
      }
      advance(queues[found[draws() % found.size()]]);
    }
  }
}

// Run the fewest items before a point: those of its stream, and of what that waits for.
bool advance_towards(Point point) {
  auto& queue = queues[point.line];
  if (queue.done >= point.position || queue.items.empty()) {
    return false;
  }
  auto& front = queue.items.front();
  if (front.after && !is_done(*front.after)) {
    return advance_towards(*front.after);
  }
  return advance(queue);
}

}  // namespace

Locked::Locked() {
  if (Py_IsInitialized() && PyGILState_Check()) {
    thread_state_ = PyEval_SaveThread();
  }
  lock.lock();
}

Locked::~Locked() {
  lock.unlock();
  if (thread_state_ != nullptr) {
    PyEval_RestoreThread(static_cast<PyThreadState*>(thread_state_));
  }
}

bool try_lock() {
  return lock.try_lock();
}

void unlock() {
  lock.unlock();
}

void begin(Order new_order, uint64_t seed) {
  Locked locked;
  finish_all();
  order = new_order;
  draws.seed(seed);
  deferred = nullptr;
}

int current_line() {
  return current;
}

void set_current_line(int line) {
  current = line;
}

int new_line() {
  Locked locked;
  queues.emplace_back();
  return static_cast<int>(queues.size()) - 1;
}

std::string name_of(int line) {
  return line == 0 ? "the default stream" : "stream " + std::to_string(line);
}

void issue(int line, Step step) {
  Locked locked;
  auto& queue = queues[line];
  queue.items.push_back({std::move(step), std::nullopt});
  queue.issued += 1;
  run_some();
  if (order == Order::Eager && !is_running) {
    raise_deferred();  // where it was issued, which is of more use
  }
}

void follow(int line, Point point) {
  Locked locked;
  if (point.line < 0 || point.line == line || is_done(point)) {
    return;
  }
  auto& queue = queues[line];
  queue.items.push_back({nullptr, point});
  queue.issued += 1;
  run_some();
}

Point now(int line) {
  Locked locked;
  return {line, queues[line].issued};
}

bool is_done(Point point) {
  Locked locked;
  return point.line < 0 || queues[point.line].done >= point.position;
}

void finish(Point point) {
  Locked locked;
  TORCH_CHECK(!is_running, "work of a stream waits for the device, which can never end");
  auto pause = std::chrono::microseconds(20);
  while (!is_done(point)) {
    bool moved = false;
    if (order == Order::Random) {
      auto found = ready();
      moved = !found.empty() && advance(queues[found[draws() % found.size()]]);
    }
    moved = advance_towards(point) || moved;
    // What is left waits for another rank. That one may wait for any other stream of this device.
    if (!moved && !advance_any()) {
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(1000));
    }
  }
}

void finish_all() {
  Locked locked;
  for (size_t i = 0; i < queues.size(); i++) {
    finish({static_cast<int>(i), queues[i].issued});
  }
}

void raise_deferred() {
  Locked locked;
  if (deferred) {
    auto error = deferred;
    deferred = nullptr;
    std::rethrow_exception(error);
  }
}

namespace {

c10::DeviceIndex number_in(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return static_cast<c10::DeviceIndex>(text == nullptr ? otherwise : std::atoi(text));
}

}  // namespace

c10::Device the_device() {
  static const auto index = number_in("LOCAL_RANK", 0);
  return {c10::DeviceType::PrivateUse1, index};
}

c10::DeviceIndex device_count() {
  static const auto ranks = number_in("LOCAL_WORLD_SIZE", 1);
  return std::max<c10::DeviceIndex>(ranks, the_device().index() + 1);
}

// What torch asks of a device with streams and events.
namespace {

struct Event {
  Point point;
  uint64_t number = 0;  // in the journal
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr auto kind = c10::DeviceType::PrivateUse1;

  c10::DeviceType type() const override {
    return kind;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return the_device();
  }
  c10::Device getDevice() const override {
    return the_device();
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }

  c10::Stream getStream(c10::Device) const override {
    return of_line(current);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return of_line(0);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return of_line(new_line());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return of_line(new_line());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = of_line(current);
    current = static_cast<int>(stream.id());
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return is_done(now(static_cast<int>(stream.id())));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Locked locked;
    auto line = static_cast<int>(stream.id());
    journal::host_waits_for_line(line);
    finish(now(line));
    raise_deferred();
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    Locked locked;
    journal::host_waits_for_all();
    finish_all();
    raise_deferred();
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag)
      const override {
    Locked locked;
    if (*event == nullptr) {
      *event = new Event();
    } else {
      journal::forget(static_cast<Event*>(*event)->number);
    }
    auto line = static_cast<int>(stream.id());
    *static_cast<Event*>(*event) = {now(line), journal::record(line)};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) {
      return;
    }
    Locked locked;
    auto line = static_cast<int>(stream.id());
    journal::waits(line, static_cast<Event*>(event)->number);
    follow(line, static_cast<Event*>(event)->point);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) {
      return true;
    }
    Locked locked;
    auto& [point, number] = *static_cast<Event*>(event);
    if (is_done(point)) {
      journal::host_waits(number);  // what the host knows now
      return true;
    }
    if (!is_running) {
      advance_towards(point);  // or a loop that asks would never end
    }
    return false;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) {
      return;
    }
    Locked locked;
    journal::host_waits(static_cast<Event*>(event)->number);
    finish(static_cast<Event*>(event)->point);
    raise_deferred();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) {
      journal::forget(static_cast<Event*>(event)->number);
      delete static_cast<Event*>(event);
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    memory::use_on(data.get_context(), static_cast<int>(stream.id()));
  }

 private:
  static c10::Stream of_line(int line) {
    return c10::Stream(c10::Stream::UNSAFE, the_device(), static_cast<c10::StreamId>(line));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace
}  // namespace sim
