// A backend of process groups whose methods are those of a Python object.
//
// A backend is below the operators of c10d, which tensor subclasses and dispatch modes see, as they
// see those of NCCL. A process group that is written in Python is above them.

#include <Python.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/extension.h>

namespace sim {
namespace {

namespace py = pybind11;
using Tensors = std::vector<at::Tensor>;

// An object of Python that may be dropped in any thread.
class Held {
 public:
  explicit Held(py::object object) : object_(std::move(object)) {}
  ~Held() {
    if (Py_IsInitialized()) {
      py::gil_scoped_acquire acquire;
      object_ = py::object();
    } else {
      object_.release();
    }
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  // With the GIL.
  template <typename... Arguments>
  py::object call(const char* name, Arguments&... arguments) const {
    return object_.attr(name)(arguments...);
  }

 private:
  py::object object_;
};

struct Work final : c10d::Work {
  explicit Work(py::object work) : held(std::move(work)) {}

  bool wait(std::chrono::milliseconds) override {
    py::gil_scoped_acquire acquire;
    return held.call("wait").cast<bool>();
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  void blockCurrentStream() override {
    wait(kNoTimeout);
  }
  bool isCompleted() override {
    py::gil_scoped_acquire acquire;
    return held.call("is_completed").cast<bool>();
  }
  bool isSuccess() const override {
    py::gil_scoped_acquire acquire;
    return held.call("is_completed").cast<bool>();
  }
  Tensors result() override {
    py::gil_scoped_acquire acquire;
    return held.call("result").cast<Tensors>();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    py::gil_scoped_acquire acquire;
    auto future = held.call("get_future");
    return future.cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>()->fut;
  }

  Held held;
};

using Issued = c10::intrusive_ptr<c10d::Work>;

struct Backend final : c10d::Backend {
  Backend(std::string name, int rank, int size, py::object group)
      : c10d::Backend(rank, size), name(std::move(name)), group(std::move(group)) {}

  const std::string getBackendName() const override {
    return name;
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void startCoalescing() override {
    py::gil_scoped_acquire acquire;
    group.call("start_coalescing");
  }
  Issued endCoalescing() override {
    return issue("end_coalescing");
  }
  Issued broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return issue("broadcast", tensors, options);
  }
  Issued allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return issue("allreduce", tensors, options);
  }
  Issued allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return issue("allreduce_coalesced", tensors, options);
  }
  Issued reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return issue("reduce", tensors, options);
  }
  Issued allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return issue("allgather", outputs, inputs, options);
  }
  Issued _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return issue("_allgather_base", output, input, options);
  }
  Issued allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return issue("allgather_into_tensor_coalesced", outputs, inputs, options);
  }
  Issued gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return issue("gather", outputs, inputs, options);
  }
  Issued scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return issue("scatter", outputs, inputs, options);
  }
  Issued reduce_scatter(
      Tensors& outputs,
      std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override {
    return issue("reduce_scatter", outputs, inputs, options);
  }
  Issued _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return issue("_reduce_scatter_base", output, input, options);
  }
  Issued reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return issue("reduce_scatter_tensor_coalesced", outputs, inputs, options);
  }
  Issued alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override {
    return issue("alltoall_base", output, input, output_splits, input_splits, options);
  }
  Issued send(Tensors& tensors, int target, int tag) override {
    return issue("send", tensors, target, tag);
  }
  Issued recv(Tensors& tensors, int source, int tag) override {
    return issue("recv", tensors, source, tag);
  }
  Issued barrier(const c10d::BarrierOptions& options) override {
    return issue("barrier", options);
  }

 private:
  template <typename... Arguments>
  Issued issue(const char* method, Arguments&... arguments) {
    py::gil_scoped_acquire acquire;
    py::object work = group.call(method, arguments...);
    if (py::isinstance<c10d::Work>(work)) {  // of gloo
      return work.cast<Issued>();
    }
    return c10::make_intrusive<Work>(std::move(work));
  }

  std::string name;
  Held group;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> backend_of(
    const std::string& name, int rank, int size, py::object group) {
  return c10::make_intrusive<Backend>(name, rank, size, std::move(group));
}

}  // namespace sim
