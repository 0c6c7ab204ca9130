// The simulated device, as Python sees it.

#include "journal.h"
#include "memory.h"
#include "streams.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

namespace sim {

std::vector<uint64_t> take_digests();
at::Tensor host_view(const at::Tensor& tensor);
void launch(
    const std::string& name,
    const std::vector<at::Tensor>& reads,
    const std::vector<at::Tensor>& writes,
    Step step);
void host_reads(const at::Tensor& tensor);
void register_hooks();
void watch(bool on);
at::Generator& default_generator();
c10::intrusive_ptr<c10d::Backend> backend_of(
    const std::string& name, int rank, int size, pybind11::object group);

namespace {

namespace py = pybind11;

// A step that is a function of Python: it returns whether it is done.
Step python_step(py::object function) {
  auto held = std::shared_ptr<py::object>(new py::object(std::move(function)), [](py::object* each) {
    py::gil_scoped_acquire acquire;
    delete each;
  });
  return [held] {
    py::gil_scoped_acquire acquire;
    return (*held)().cast<bool>();
  };
}

py::list journal_of() {
  std::vector<journal::Entry> entries;
  {
    py::gil_scoped_release release;
    entries = journal::take();
  }
  py::list list;
  for (auto& entry : entries) {
    py::list accesses;
    for (auto& access : entry.accesses) {
      accesses.append(py::make_tuple(
          access.memory, access.offset, access.itemsize,
          py::tuple(py::cast(access.sizes)), py::tuple(py::cast(access.strides)), access.writes));
    }
    list.append(py::make_tuple(
        static_cast<int>(entry.kind), entry.line, entry.number, entry.nbytes, entry.stack,
        entry.name, accesses));
  }
  return list;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  register_hooks();
  m.def("begin", [](int order, uint64_t seed) { begin(static_cast<Order>(order), seed); },
        py::arg("order"), py::arg("seed"), py::call_guard<py::gil_scoped_release>());
  m.def("watch", &watch);
  m.def("journal", &journal_of);
  m.def("stack", [](uint64_t number) {
    std::vector<std::tuple<std::string, std::string, int>> frames;
    for (auto& frame : journal::frames_of(number)) {
      frames.emplace_back(frame.file, frame.function, frame.line);
    }
    return frames;
  });
  m.def("drop", &journal::drop);
  m.def("name_of", &name_of);
  m.def("digests", &take_digests, py::call_guard<py::gil_scoped_release>());
  m.def("host_view", &host_view);
  m.def("launch", [](const std::string& name, const std::vector<at::Tensor>& reads,
                     const std::vector<at::Tensor>& writes, py::object function) {
    auto step = python_step(std::move(function));
    py::gil_scoped_release release;
    launch(name, reads, writes, std::move(step));
  });
  m.def("host_reads", &host_reads, py::call_guard<py::gil_scoped_release>());
  m.def("memory", [] {
    auto stats = memory::stats();
    return std::make_pair(stats.allocated, stats.peak);
  });
  m.def("generator", [] { return default_generator(); });
  m.def("reset_peak", &memory::reset_peak);
  m.def("backend_of", &backend_of);
  m.def("device_index", [] { return static_cast<int>(the_device().index()); });
  m.def("device_count", [] { return static_cast<int>(device_count()); });
}

}  // namespace sim
