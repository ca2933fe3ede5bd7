// What torch asks of CUDA before autograd runs on it: one device, whose switches and streams do nothing.
// Loaded before torch, so that tensors may say they are on "cuda" where torch was built without it.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

namespace {

const Device CARD(DeviceType::CUDA, 0);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return CARD; }
  Device exchangeDevice(Device) const override { return CARD; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, CARD); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, CARD); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, CARD); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void synchronizeDevice(DeviceIndex) const override {}
};

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

c10::impl::DeviceGuardImplRegistrar guard(DeviceType::CUDA, new Guard());

}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks);
}
