// A device of torch's own kind whose memory is the CPU's: what torch asks of a device in C++.
//
// Operators are Python's (simulated.py), but for those that are called most and do least: views, and
// memory that is allocated. `alias` shows the memory of a tensor of the device as a tensor of the
// CPU, and `adopt` shows that of a CPU tensor as one of the device. Streams and events are numbers.
// What happens to them, and to memory, is told to Python, which keeps their clocks.

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kOnly(kType, 0);

struct Told {
  void (*recorded)(int64_t event, int64_t stream);
  void (*blocked)(int64_t event, int64_t stream);
  int (*passed)(int64_t event);
  int (*idle)(int64_t stream);
  void (*waited_for_event)(int64_t event);
  void (*waited_for_stream)(int64_t stream);  // -1: for all of them
  void (*freed)(int64_t address);             // device memory, or pinned memory
  void (*allocated)(int64_t address, int64_t stream);
  void (*filled)(int64_t address, int64_t bytes, int64_t stream);  // when it was allocated
};

Told python;
std::atomic<bool> tells{false};
thread_local int64_t current_stream = 0;
std::atomic<int64_t> streams{1}, events{1};

int64_t number(void* event) { return reinterpret_cast<int64_t>(event); }

void tell_freed(const void* address) {
  if (tells) python.freed(reinterpret_cast<int64_t>(address));
}

// Streams and events. Work is done when it is launched, so an event is reached when it is recorded;
// when that was is kept of timed ones.

using Clock = std::chrono::steady_clock;
std::mutex of_times;
std::unordered_map<void*, Clock::time_point> reached;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kOnly, id); }

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kOnly; }
  c10::Device getDevice() const override { return kOnly; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(streams++); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream(streams++);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = stream(current_stream);
    current_stream = next.id();
    return before;
  }
  bool queryStream(const c10::Stream& of) const override { return python.idle(of.id()); }
  void synchronizeStream(const c10::Stream& of) const override { python.waited_for_stream(of.id()); }
  void synchronizeDevice(const c10::DeviceIndex) const override { python.waited_for_stream(-1); }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(events++);
    python.recorded(number(*event), on.id());
    if (flag != c10::EventFlag::BACKEND_DEFAULT) return;
    std::lock_guard<std::mutex> held(of_times);
    reached[*event] = Clock::now();
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    std::lock_guard<std::mutex> held(of_times);
    return std::chrono::duration<double, std::milli>(reached.at(to) - reached.at(from)).count();
  }
  void block(void* event, const c10::Stream& of) const override {
    if (event != nullptr) python.blocked(number(event), of.id());
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || python.passed(number(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) python.waited_for_event(number(event));
  }
};

// Pinned memory.

std::mutex lock;
std::unordered_set<const void*> pinned;

void unpin(void* address) {
  tell_freed(address);
  {
    std::lock_guard<std::mutex> held(lock);
    pinned.erase(address);
  }
  c10::GetCPUAllocator()->raw_deallocate(address);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = c10::GetCPUAllocator()->raw_allocate(bytes > 0 ? bytes : 1);
    std::lock_guard<std::mutex> held(lock);
    pinned.insert(address);
    return {address, address, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

void resize(const c10::Storage& mine, size_t bytes);

struct Hooks final : at::PrivateUse1HooksInterface {
  void resizePrivateUse1Bytes(const c10::Storage& mine, size_t bytes) const override {
    resize(mine, bytes);
  }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
  bool isPinnedPtr(const void* address) const override {
    std::lock_guard<std::mutex> held(lock);
    return pinned.count(address) > 0;
  }
};

// Memory of the device: each storage keeps that of the CPU which it shows, and each of those has one
// storage on the device.

std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> shown;

void let_go(void* kept) {
  auto* cpu = static_cast<c10::Storage*>(kept);
  tell_freed(cpu->data());
  {
    std::lock_guard<std::mutex> held(lock);
    shown.erase(cpu->unsafeGetStorageImpl());
  }
  delete cpu;
}

c10::DataPtr memory_of(const c10::Storage& cpu) {
  return {cpu.mutable_data(), new c10::Storage(cpu), &let_go, kOnly};
}

c10::Storage on_device(const c10::Storage& cpu) {
  std::lock_guard<std::mutex> held(lock);
  auto found = shown.find(cpu.unsafeGetStorageImpl());
  if (found != shown.end()) {
    if (auto alive = found->second.lock()) return c10::Storage(std::move(alive));
    shown.erase(found);
  }
  c10::Storage made(c10::Storage::use_byte_size_t(), cpu.nbytes(), memory_of(cpu), nullptr, false);
  shown.emplace(cpu.unsafeGetStorageImpl(), made.getWeakStorageImpl());
  return made;
}

// Memory is let go, or there is some again: full of nan, for a kernel that reads too early.
void resize(const c10::Storage& mine, size_t bytes) {
  TORCH_CHECK(bytes == 0 || mine.nbytes() == 0, "memory that there is keeps its size here");
  auto* storage = mine.unsafeGetStorageImpl();
  if (bytes == 0) {
    storage->set_data_ptr_noswap(c10::DataPtr(nullptr, kOnly));
    storage->set_nbytes(0);
    return;
  }
  c10::Storage cpu(c10::Storage::use_byte_size_t(), bytes, c10::GetCPUAllocator(), false);
  std::memset(cpu.mutable_data(), 0xff, bytes);
  {
    std::lock_guard<std::mutex> held(lock);
    shown.emplace(cpu.unsafeGetStorageImpl(), mine.getWeakStorageImpl());
  }
  storage->set_data_ptr_noswap(memory_of(cpu));
  storage->set_nbytes(bytes);
  if (tells) python.allocated(number(cpu.mutable_data()), current_stream);
}

at::Tensor placed(const c10::Storage& storage, const at::Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage),
                                                       c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                    like.storage_offset());
  return made;
}

at::Tensor alias(const at::Tensor& mine) {
  auto* kept = static_cast<c10::Storage*>(mine.storage().data_ptr().get_context());
  TORCH_CHECK(kept != nullptr, "a kernel reads or writes memory that was let go");
  return placed(*kept, mine, c10::DispatchKey::CPU);
}

at::Tensor adopt(const at::Tensor& cpu) {
  return placed(on_device(cpu.storage()), cpu, c10::DispatchKey::PrivateUse1);
}

// torch fills what it allocates where nothing is to depend on chance.
at::Tensor told(const at::Tensor& cpu) {
  auto mine = adopt(cpu);
  if (!tells || cpu.storage().nbytes() == 0) return mine;
  auto address = number(cpu.storage().mutable_data());
  python.allocated(address, current_stream);
  if (at::globalContext().deterministicAlgorithms() &&
      at::globalContext().deterministicFillUninitializedMemory())
    python.filled(address, cpu.storage().nbytes(), current_stream);
  return mine;
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  auto options = at::TensorOptions(at::kCPU).dtype(dtype).layout(layout);
  return told(at::empty(C10_AS_INTARRAYREF_SLOW(size), options, format));
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                         std::optional<at::Device>, std::optional<bool>) {
  auto options = at::TensorOptions(at::kCPU).dtype(dtype).layout(layout);
  return told(at::empty_strided(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                options));
}

at::Tensor as_strided(const at::Tensor& mine, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(mine, C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), start);
}

at::Tensor view(const at::Tensor& mine, c10::SymIntArrayRef size) {
  return at::native::view(mine, C10_AS_INTARRAYREF_SLOW(size));
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
}

TORCH_LIBRARY(simulated, m) {
  m.def("alias(Tensor mine) -> Tensor", alias);
  m.def("adopt(Tensor cpu) -> Tensor", adopt);
}

// Under autocast: the types that other devices compute in.

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOW)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FULL)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(PROMOTE)
}

extern "C" void install(const Told* told) {
  python = *told;
  tells = true;
  static c10::impl::DeviceGuardImplRegistrar once(kType, new Guard());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

extern "C" void be_silent() { tells = false; }
