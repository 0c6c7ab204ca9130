// What the device computes: any operator that the CPU has, on the same memory, later.
//
// An operator is asked for its outputs at once, and computes them when the order of its stream lets
// it. The shapes, strides and dtypes of its outputs are those that the CPU gives for tensors of the
// same form, found once for each form.

#include "journal.h"
#include "memory.h"
#include "streams.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <sstream>
#include <unordered_map>
#include <unordered_set>

namespace sim {
namespace {

using at::IValue;
using at::Tensor;
using journal::Access;

constexpr c10::DeviceType KIND = c10::DeviceType::PrivateUse1;

bool on_device(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == KIND;
}

// Work runs below autograd and below all that looks at operators from Python.
struct BelowAll {
  c10::impl::ExcludeDispatchKeyGuard keys{
      c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet(
          {c10::DispatchKey::ADInplaceOrView,
           c10::DispatchKey::Python,
           c10::DispatchKey::PythonTLSSnapshot,
           c10::DispatchKey::PythonDispatcher,
           c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
           c10::DispatchKey::FuncTorchDynamicLayerBackMode,
           c10::DispatchKey::Functionalize})};
  at::DisableRecordFunctionGuard record;
};

// The same bytes as a tensor of the CPU.
Tensor as_host(const Tensor& tensor) {
  auto* start = static_cast<char*>(memory::seen_by_work(tensor.storage().data()));
  auto options = at::TensorOptions(tensor.dtype()).device(c10::DeviceType::CPU);
  if (start == nullptr) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  start += tensor.storage_offset() * tensor.itemsize();
  Tensor host = at::from_blob(start, tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) {
    host._set_conj(true);
  }
  if (tensor.is_neg()) {
    host._set_neg(true);
  }
  return host;
}

Access access_of(const Tensor& tensor, bool writes) {
  auto [number, offset] = journal::memory_of(tensor.storage().data());
  return {
      number,
      offset + tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize()),
      static_cast<int64_t>(tensor.itemsize()),
      tensor.sizes().vec(),
      tensor.strides().vec(),
      writes};
}

// Call a function with each tensor of a value, which it may replace.
template <typename Change>
void change_tensors(IValue& value, Change change) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      value = change(value.toTensor());
    }
  } else if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& each : value.toTensorVector()) {
      changed.push_back(each.defined() ? change(each) : each);
    }
    value = changed;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor>& each : value.toOptionalTensorVector()) {
      changed.push_back(each && each->defined() ? std::make_optional(change(*each)) : each);
    }
    value = changed;
  }
}

template <typename Look>
void each_tensor(const IValue& value, Look look) {
  IValue copy = value;
  change_tensors(copy, [&](const Tensor& tensor) {
    look(tensor);
    return tensor;
  });
}

// Generators ------------------------------------------------------------------------------------

// Draws do not depend on when work runs: each operator has a seed of its own.
struct Generator final : c10::GeneratorImpl {
  Generator() : c10::GeneratorImpl(the_device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  uint64_t next() {
    auto mixed = seed_ + 0x9E3779B97F4A7C15ULL * ++offset_;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ULL;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBULL;
    return mixed ^ (mixed >> 31);
  }

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }
  uint64_t get_offset() const override {
    return offset_;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.numel() == 16 && state.dtype() == at::kByte,
        "a state of a generator of the simulated device has 16 bytes");
    auto* numbers = static_cast<const uint64_t*>(state.data());
    seed_ = numbers[0];
    offset_ = numbers[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Tensor state = at::detail::empty_cpu({16}, at::kByte, {}, {}, {}, {});
    auto* numbers = static_cast<uint64_t*>(state.data_ptr());
    numbers[0] = seed_;
    numbers[1] = offset_;
    return state.getIntrusivePtr();
  }
  static c10::DeviceType device_type() {
    return KIND;
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator();
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

}  // namespace

at::Generator& default_generator() {
  static at::Generator generator = at::make_generator<Generator>();
  return generator;
}

namespace {

uint64_t next_seed(const IValue& given) {
  bool is_ours = given.isGenerator() && given.toGenerator().defined() &&
      given.toGenerator().device().type() == KIND;
  at::Generator generator = is_ours ? given.toGenerator() : default_generator();
  std::lock_guard<std::mutex> locked(generator.mutex());
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->next();
}

// Let the default generator of the CPU draw from a seed in the scope.
struct SeededHost {
  explicit SeededHost(uint64_t seed)
      : generator(at::detail::getDefaultCPUGenerator()), state(generator.get_state()) {
    generator.set_current_seed(seed);
  }
  ~SeededHost() {
    generator.set_state(state);
  }
  at::Generator generator;
  Tensor state;
};

// Operators -------------------------------------------------------------------------------------

// What an operator gives for tensors of one form: for each returned value, tensors without values.
struct Form {
  std::vector<IValue> outputs;  // tensors of device meta
  std::vector<int64_t> offsets;  // of the outputs in their storages, in elements
  std::vector<std::vector<int64_t>> written;  // sizes of arguments that are written, in order
  bool resizes = false;  // whether the CPU gives ``out`` other sizes meanwhile
};

std::unordered_map<std::string, Form> forms;

struct NoWarnings final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
} no_warnings;

void append(std::ostringstream& key, const IValue& value) {
  if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
    key << '[';
    each_tensor(value, [&](const Tensor& tensor) {
      key << static_cast<int>(tensor.scalar_type()) << static_cast<int>(tensor.device().type())
          << tensor.sizes() << tensor.strides() << ';';
    });
    key << ']';
  } else if (!value.isGenerator() && !value.isStorage()) {
    key << value;
  }
  key << ',';
}

void call_host(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

const Form& form_of(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  std::ostringstream key;
  key << op.operator_name() << '(';
  for (auto& value : arguments) {
    append(key, value);
  }
  {
    Locked locked;
    auto found = forms.find(key.str());
    if (found != forms.end()) {
      return found->second;
    }
  }
  Form form;
  torch::jit::Stack stack, given;
  auto run = [&] {
    stack.clear();
    for (size_t i = 0; i < arguments.size(); i++) {
      auto value = arguments[i];
      bool is_out = op.schema().arguments()[i].is_out();
      change_tensors(value, [&](const Tensor& tensor) {
        auto options = at::TensorOptions(tensor.dtype()).device(at::kCPU);
        if (is_out && form.resizes) {
          return at::empty({0}, options);
        }
        auto scratch = at::empty_strided(tensor.sizes(), tensor.strides(), options);
        if (is_out && tensor.numel() > 0) {
          scratch.storage().unsafeGetStorageImpl()->set_resizable(false);
        }
        return tensor.is_floating_point() ? scratch.fill_(0.5) : scratch.zero_();
      });
      if (value.isGenerator()) {
        value = IValue();
      } else if (value.isDevice() && value.toDevice().type() == KIND) {
        value = c10::Device(c10::DeviceType::CPU);
      }
      stack.push_back(value);
    }
    given = stack;
    // Outputs that are too small are told about when the operator runs.
    c10::WarningUtils::WarningHandlerGuard silent(&no_warnings);
    Locked locked;  // of the generator of the host
    SeededHost seeded(0);
    call_host(op, stack);
  };
  try {
    run();
  } catch (const c10::Error&) {
    form.resizes = true;
    run();
  }
  const auto& schema = op.schema();
  for (size_t i = 0; i < given.size(); i++) {
    if (is_written(schema.arguments()[i])) {
      each_tensor(given[i], [&](const Tensor& tensor) {
        form.written.push_back(tensor.sizes().vec());
      });
    }
  }
  for (auto& output : stack) {
    change_tensors(output, [&](const Tensor& tensor) {
      form.offsets.push_back(tensor.storage_offset());
      return at::empty_strided(
          tensor.sizes(), tensor.strides(), at::TensorOptions(tensor.dtype()).device(at::kMeta));
    });
    form.outputs.push_back(output);
  }
  Locked locked;
  return forms[key.str()] = std::move(form);
}

// Whether the shapes or numbers that an operator gives depend on values, which the host then reads.
bool reads_values(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  static const std::unordered_set<std::string> names = {
      "aten::equal", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::allclose",
      "aten::_unique2", "aten::bincount", "aten::_linalg_check_errors"};
  if (names.count(op.schema().name()) != 0) {
    return true;
  }
  if (op.schema().name() != "aten::index") {
    return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  }
  bool has_mask = false;  // without one, shapes of indices say all
  for (auto& value : arguments) {
    if (value.isOptionalTensorList()) {
      each_tensor(value, [&](const Tensor& tensor) {
        has_mask = has_mask || tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
      });
    }
  }
  return has_mask;
}

Tensor new_on_device(const Tensor& like) {
  return at::empty_strided(
      like.sizes(), like.strides(), at::TensorOptions(like.dtype()).device(the_device()));
}

void check_devices(const c10::OperatorHandle& op, std::vector<IValue>& arguments) {
  bool takes_indices = op.schema().name().find("index") != std::string::npos;
  for (auto& value : arguments) {
    change_tensors(value, [&](const Tensor& tensor) {
      if (on_device(tensor) || tensor.device().type() == c10::DeviceType::Meta) {
        return tensor;
      }
      if (tensor.dim() == 0) {
        return tensor.clone();  // a number, which is part of the launch
      }
      TORCH_CHECK(
          takes_indices && value.isOptionalTensorList(),
          "Expected all tensors to be on the same device, but ", op.schema().name(),
          " got one of shape ", tensor.sizes(), " on ", tensor.device(), " beside others on the "
          "simulated device: move it with .to(device)");
      return tensor.to(the_device());
    });
  }
}


// What the host has seen -------------------------------------------------------------------------

std::vector<uint64_t> digests;  // of all that was copied to the host, in order of issue

uint64_t digest_of(const Tensor& host) {
  Tensor values = host.contiguous();
  auto* bytes = static_cast<const uint8_t*>(values.data_ptr());
  uint64_t digest = 0xCBF29CE484222325ULL;
  for (size_t i = 0; i < values.nbytes(); i++) {
    digest = (digest ^ bytes[i]) * 0x100000001B3ULL;
  }
  return digest;
}

size_t next_digest() {
  digests.push_back(0);
  return digests.size() - 1;
}

// Let the host wait for all that was issued on the current stream.
void wait_for_current() {
  int line = current_line();
  journal::host_waits_for_line(line);
  finish(now(line));
  raise_deferred();
}

// The argument that a returned value is, if it is one that was written.
std::optional<size_t> returned_argument(const c10::FunctionSchema& schema, size_t number) {
  const auto* alias = schema.returns()[number].alias_info();
  if (alias == nullptr || !alias->isWrite()) {
    return std::nullopt;
  }
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other != nullptr && other->beforeSets() == alias->beforeSets()) {
      return i;
    }
  }
  return std::nullopt;
}

// Run an operator at once, for its values are needed to go on.
void run_at_once(
    const c10::OperatorHandle& op,
    const std::vector<IValue>& arguments,
    torch::jit::Stack* stack,
    uint64_t where) {
  Locked locked;
  const auto& schema = op.schema();
  std::vector<Access> accesses;
  torch::jit::Stack host;
  std::vector<std::pair<Tensor, Tensor>> resized;  // arguments to write into, and what was written
  for (size_t i = 0; i < arguments.size(); i++) {
    auto value = arguments[i];
    bool writes = is_written(schema.arguments()[i]);
    bool is_out = schema.arguments()[i].is_out();
    change_tensors(value, [&](const Tensor& tensor) {
      if (!on_device(tensor)) {
        return tensor;
      }
      accesses.push_back(access_of(tensor, writes));
      if (!is_out) {
        return as_host(tensor);
      }
      resized.emplace_back(tensor, at::empty({0}, at::TensorOptions(tensor.dtype())));
      return resized.back().second;
    });
    if (value.isDevice() && value.toDevice().type() == KIND) {
      value = c10::Device(c10::DeviceType::CPU);
    }
    host.push_back(value);
  }
  journal::operation(schema.name().c_str(), current_line(), std::move(accesses), where);
  wait_for_current();
  {
    SeededHost seeded(next_seed(IValue()));
    call_host(op, host);
  }
  for (auto& [target, source] : resized) {
    target.resize_(source.sizes());
    target.copy_(source);
  }
  for (size_t i = 0; i < host.size(); i++) {
    if (auto argument = returned_argument(schema, i)) {
      stack->push_back(arguments[*argument]);
      continue;
    }
    change_tensors(host[i], [](const Tensor& tensor) {
      return tensor.to(the_device());
    });
    stack->push_back(host[i]);
  }
}

// A tensor on the memory of another one.
Tensor view_of(const Tensor& base, const Tensor& form, int64_t offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), form.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  auto start = base.storage_offset() * static_cast<int64_t>(base.itemsize());
  impl->set_sizes_and_strides(
      form.sizes(), form.strides(), start / static_cast<int64_t>(form.itemsize()) + offset);
  return view;
}

void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  uint64_t where = journal::is_on() ? journal::here() : 0;
  BelowAll below;
  auto given = torch::jit::last(*stack, schema.arguments().size());
  std::vector<IValue> arguments(given.begin(), given.end());
  torch::jit::drop(*stack, schema.arguments().size());
  check_devices(op, arguments);
  if (reads_values(op, arguments)) {
    run_at_once(op, arguments, stack, where);
    return;
  }
  const Form* form = nullptr;
  try {
    form = &form_of(op, arguments);
  } catch (const c10::Error&) {
    // Values of a scratch may be none that it takes; what is wrong with these, it says itself.
    run_at_once(op, arguments, stack, where);
    return;
  }

  std::vector<Access> accesses;
  torch::jit::Stack host;
  IValue generator;
  size_t written = 0;
  std::vector<std::pair<Tensor, size_t>> fresh;  // of `out`: where it goes, and the argument
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& argument = schema.arguments()[i];
    IValue value = arguments[i];
    bool writes = is_written(argument);
    each_tensor(value, [&](const Tensor& tensor) {
      if (writes) {
        auto& sizes = form->written[written++];
        if (tensor.sizes() != at::IntArrayRef(sizes)) {
          tensor.resize_(sizes);
        }
      }
      if (on_device(tensor) && tensor.numel() > 0) {
        accesses.push_back(access_of(tensor, writes));
      }
    });
    bool is_fresh = form->resizes && argument.is_out();
    change_tensors(value, [&](const Tensor& tensor) {
      if (!on_device(tensor)) {
        return tensor;
      }
      if (is_fresh) {
        fresh.emplace_back(as_host(tensor), i);
        return Tensor(at::empty({0}, at::TensorOptions(tensor.dtype())));
      }
      return as_host(tensor);
    });
    if (value.isGenerator()) {
      generator = value;
      value = IValue();
    } else if (value.isDevice() && value.toDevice().type() == KIND) {
      value = c10::Device(c10::DeviceType::CPU);
    }
    host.push_back(value);
  }

  // Outputs: arguments that were written, views of arguments, or new tensors.
  torch::jit::Stack outputs;
  std::vector<std::pair<size_t, IValue>> results;  // of new tensors: the number, and their bytes
  size_t offset = 0;
  bool is_view = false;
  for (size_t i = 0; i < form->outputs.size(); i++) {
    IValue value = form->outputs[i];
    if (auto argument = returned_argument(schema, i)) {
      value = arguments[*argument];
    } else if (schema.returns()[i].alias_info() != nullptr) {
      is_view = true;  // of the first argument, as all that have no kernel of their own
      change_tensors(value, [&](const Tensor& tensor) {
        return view_of(arguments[0].toTensor(), tensor, form->offsets[offset++]);
      });
    } else {
      change_tensors(value, [&](const Tensor& tensor) {
        return new_on_device(tensor);
      });
      IValue bytes = value;
      bool has_tensors = false;
      change_tensors(bytes, [&](const Tensor& tensor) {
        has_tensors = true;
        if (tensor.numel() > 0) {
          accesses.push_back(access_of(tensor, true));
        }
        return as_host(tensor);
      });
      if (has_tensors) {
        results.emplace_back(i, bytes);
      }
    }
    outputs.push_back(value);
  }
  if (!is_view) {
    bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
    uint64_t seed = draws ? next_seed(generator) : 0;
    Locked locked;
    journal::operation(schema.name().c_str(), current_line(), std::move(accesses), where);
    issue(current_line(), [op, host, results, fresh, draws, seed]() mutable {
      BelowAll below;
      c10::InferenceMode inference;
      std::optional<SeededHost> seeded;
      if (draws) {
        seeded.emplace(seed);
      }
      auto given = host;
      call_host(op, host);
      for (auto& [target, argument] : fresh) {
        target.copy_(given[argument].toTensor());
      }
      for (auto& [number, bytes] : results) {
        if (bytes.isTensor()) {
          bytes.toTensor().copy_(host[number].toTensor());
          continue;
        }
        auto targets = bytes.toTensorVector();
        auto sources = host[number].toTensorVector();
        for (size_t i = 0; i < targets.size(); i++) {
          targets[i].copy_(sources[i]);
        }
      }
      return true;
    });
  }
  for (auto& value : outputs) {
    stack->push_back(value);
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}

// Operators about memory -------------------------------------------------------------------------

Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size,
      memory::device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(c10::get_default_dtype_as_scalartype()),
      format);
}

Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size,
      stride,
      memory::device_allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

Tensor as_strided(
    const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor view(const Tensor& self, c10::IntArrayRef size) {
  return at::native::view(self, size);
}

Tensor reshape_alias(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

void grow(const Tensor& self) {
  auto nbytes = at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.itemsize(), self.storage_offset());
  if (self.numel() > 0 && nbytes > self.storage().nbytes()) {
    memory::resize(self.storage(), nbytes);
  }
}

const Tensor& resize_(
    const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve && *format != at::MemoryFormat::Contiguous) {
    impl->empty_tensor_restride(*format);
  }
  grow(self);
  return self;
}

Tensor& set_storage_offset(
    Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, source, offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  if (stride.data() == nullptr || (stride.empty() && !size.empty())) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  grow(self);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  auto size = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_offset(self, std::move(source), 0, {size}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_offset(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::Storage nothing(
      c10::Storage::use_byte_size_t(),
      0,
      memory::device_allocator()->allocate(0),
      memory::device_allocator(),
      true);
  return set_storage_offset(self, std::move(nothing), 0, {0}, {});
}

// The same bytes of the host, as a tensor that no Python object has.
Tensor plain(const Tensor& host) {
  return at::from_blob(
      host.data_ptr(), host.sizes(), host.strides(), at::TensorOptions(host.dtype()));
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  uint64_t where = journal::is_on() ? journal::here() : 0;
  BelowAll below;
  bool from_host = !on_device(self);
  bool to_host = !on_device(target);
  const Tensor& on_host = from_host ? self : target;
  bool is_pinned = (from_host || to_host) && memory::is_pinned(on_host.storage().data());
  // What is not pinned is copied by way of the driver's own memory before the call returns.
  Tensor source = !from_host ? as_host(self) : is_pinned && non_blocking ? plain(self) : self.clone();
  Tensor written = to_host ? plain(target) : as_host(target);
  Locked locked;
  int line = current_line();
  std::vector<Access> accesses;
  if (self.numel() > 0) {
    if (!from_host || (is_pinned && non_blocking)) {
      accesses.push_back(access_of(self, false));
    }
    if (!to_host || is_pinned) {
      accesses.push_back(access_of(target, true));
    }
  }
  if (is_pinned) {
    memory::use_on(on_host.storage().data_ptr().get_context(), line);
  }
  journal::operation("aten::copy_", line, std::move(accesses), where);
  size_t number = to_host ? next_digest() : 0;
  issue(line, [=] {
    BelowAll below;
    written.copy_(source);
    if (to_host) {
      digests[number] = digest_of(written);
    }
    return true;
  });
  if ((from_host || to_host) && !(non_blocking && (is_pinned || from_host))) {
    wait_for_current();
  }
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  if (target.sizes() != self.sizes()) {
    target.resize_(self.sizes());
  }
  return copy_from(self, target, false);
}

at::Scalar local_scalar(const Tensor& self) {
  uint64_t where = journal::is_on() ? journal::here() : 0;
  BelowAll below;
  Locked locked;
  journal::operation("aten::item", current_line(), {access_of(self, false)}, where);
  size_t number = next_digest();
  wait_for_current();
  Tensor host = as_host(self);
  digests[number] = digest_of(host);
  return host.item();
}

void record_stream(Tensor& self, c10::Stream stream) {
  memory::use_on(self.storage().data_ptr().get_context(), static_cast<int>(stream.id()));
}

bool has_compatible_type(const Tensor&, const Tensor&) {
  return true;
}

Tensor convolution(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<Tensor>& bias,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  torch::jit::Stack stack;
  torch::jit::push(
      stack, input, weight, bias, stride.vec(), padding.vec(), dilation.vec(), transposed,
      output_padding.vec(), groups);
  run_operator(op, &stack);
  return stack[0].toTensor();
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient,
    const Tensor& input,
    const Tensor& weight,
    c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation,
    bool transposed,
    c10::SymIntArrayRef output_padding,
    c10::SymInt groups,
    std::array<bool, 3> mask) {
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  torch::jit::Stack stack;
  std::optional<std::vector<c10::SymInt>> bias({weight.sym_size(transposed ? 1 : 0)});
  torch::jit::push(
      stack, gradient, input, weight, bias, stride.vec(), padding.vec(), dilation.vec(), transposed,
      output_padding.vec(), groups, std::vector<bool>(mask.begin(), mask.end()));
  run_operator(op, &stack);
  auto tensor = [&](size_t i) {
    return stack[i].isTensor() ? stack[i].toTensor() : Tensor();
  };
  return {tensor(0), tensor(1), tensor(2)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_type);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

int64_t plain_attention(
    const Tensor&,
    const Tensor&,
    const Tensor&,
    const std::optional<Tensor>&,
    double,
    bool,
    std::optional<double>,
    bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

// What torch asks of an accelerator --------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override {
    return the_device().index();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return the_device().index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return the_device().index();
  }
  bool isPinnedPtr(const void* data) const override {
    return memory::is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return memory::pinned_allocator();
  }
  c10::Device getDeviceFromPtr(void*) const override {
    return the_device();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    memory::resize(storage, nbytes);
  }
};

// Operators of the host on pinned memory ---------------------------------------------------------

bool touches_no_values(const c10::FunctionSchema& schema) {
  for (auto& returned : schema.returns()) {
    if (returned.alias_info() != nullptr && !returned.alias_info()->isWrite()) {
      return true;  // a view
    }
  }
  for (auto& argument : schema.arguments()) {
    if (argument.name() == "device") {
      return true;  // it makes a tensor elsewhere, by operators of its own
    }
  }
  static const std::unordered_set<std::string> names = {
      "aten::is_pinned", "aten::resize_", "aten::set_", "aten::record_stream", "aten::sym_size"};
  return names.count(schema.name()) != 0;
}

std::unique_ptr<at::ObserverContext> look_at_host(const at::RecordFunction& function) {
  bool has_pinned = false;
  bool has_device = false;
  for (const IValue& value : function.inputs()) {
    each_tensor(value, [&](const Tensor& tensor) {
      has_device = has_device || on_device(tensor);
      has_pinned = has_pinned ||
          (tensor.device().is_cpu() && tensor.has_storage() && memory::is_pinned(tensor.storage().data()));
    });
  }
  auto schema = has_pinned && !has_device ? function.operator_schema() : std::nullopt;
  if (!schema || touches_no_values(*schema)) {
    return nullptr;
  }
  std::vector<Access> accesses;
  size_t number = 0;
  for (const IValue& value : function.inputs()) {
    bool writes = is_written(schema->arguments()[number++]);
    each_tensor(value, [&](const Tensor& tensor) {
      if (tensor.numel() > 0 && memory::is_pinned(tensor.storage().data())) {
        accesses.push_back(access_of(tensor, writes));
      }
    });
  }
  uint64_t where = journal::here();
  Locked locked;
  journal::operation(schema->name().c_str(), journal::HOST, std::move(accesses), where);
  return nullptr;
}

Hooks hooks;

}  // namespace

std::vector<uint64_t> take_digests() {
  Locked locked;
  finish_all();
  return std::exchange(digests, {});
}

Tensor host_view(const Tensor& tensor) {
  return as_host(tensor);
}

// Issue work of the host's on the current stream, such as a collective.
void launch(
    const std::string& name,
    const std::vector<Tensor>& reads,
    const std::vector<Tensor>& writes,
    Step step) {
  uint64_t where = journal::is_on() ? journal::here() : 0;
  Locked locked;
  std::vector<Access> accesses;
  for (auto& tensor : reads) {
    accesses.push_back(access_of(tensor, false));
  }
  for (auto& tensor : writes) {
    accesses.push_back(access_of(tensor, true));
  }
  journal::operation(name.c_str(), current_line(), std::move(accesses), where);
  issue(current_line(), std::move(step));
}

// Values of a tensor that the host reads without an operator.
void host_reads(const Tensor& tensor) {
  if (!memory::is_pinned(tensor.storage().data())) {
    return;
  }
  uint64_t where = journal::here();
  Locked locked;
  journal::operation("read", journal::HOST, {access_of(tensor, false)}, where);
}

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

// Write the journal from now on, or no more; without it operators of the host cost what they did.
void watch(bool on) {
  static at::CallbackHandle handle = 0;
  if (on && !journal::is_on()) {
    handle = at::addGlobalCallback(at::RecordFunctionCallback(look_at_host)
                                       .needsInputs(true)
                                       .scopes({at::RecordScope::FUNCTION}));
  } else if (!on && journal::is_on()) {
    at::removeCallback(handle);
  }
  journal::turn_on(on);
}

}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::plain_attention);
}
