// The streams of the simulated device: queues of work that run on the CPU, in a chosen order.
//
// Work runs in the thread that needs it, under one lock. Nobody waits for the lock with the GIL, so
// work that is Python code may take the GIL under it.

#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

// The one device of this process. A host has as many as ranks, and this is that of the local rank,
// whichever index a program gives.
c10::Device the_device();
c10::DeviceIndex device_count();

// A stream and how much of it must be done: an event.
struct Point {
  int line = -1;
  uint64_t position = 0;
};

enum class Order : int {
  Eager = 0,   // work runs when it is issued
  Lazy = 1,    // work runs when somebody needs it
  Random = 2,  // some of what may run runs, drawn from a seed
};

// Holds the lock of the device in its scope, and gives the GIL up while it waits for it.
class Locked {
 public:
  Locked();
  ~Locked();
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  void* thread_state_ = nullptr;  // PyThreadState*, if this thread had the GIL
};

// Take the lock of the device if no other thread has it; whether this thread has it now.
bool try_lock();
void unlock();

// What a stream does: a function that returns whether it is done. It is called again until it is.
using Step = std::function<bool()>;

// Begin anew: no streams but the default one, nothing queued.
void begin(Order order, uint64_t seed);

int current_line();
void set_current_line(int line);
int new_line();
std::string name_of(int line);

// Issue work on a stream.
void issue(int line, Step step);
// Let all that is issued on a stream from now on follow a point.
void follow(int line, Point point);
Point now(int line);
bool is_done(Point point);
// Run what has to run before a point, and what else the order lets run.
void finish(Point point);
void finish_all();
// An error that work has raised since it was last asked, for whoever waits next.
void raise_deferred();

}  // namespace sim
