/* What csrc/device declares of the driver's binary interface, against NVIDIA's header: compiled, never run. */
#include <cuda.h>

#include <cstddef>
#include <type_traits>

#include "device/cuda_driver.h"

namespace {

template <typename T, typename = void> struct is_known : std::false_type {};
template <typename T> struct is_known<T, std::void_t<decltype(sizeof(T))>> : std::true_type {};

/* Passed in the same way: a number of that size, a handle, or a pointer to the same number of bytes. */
template <typename A, typename B>
constexpr bool
is_alike() {
    using to_a = std::remove_cv_t<std::remove_pointer_t<A>>;
    using to_b = std::remove_cv_t<std::remove_pointer_t<B>>;
    if constexpr (!std::is_pointer_v<A> || !std::is_pointer_v<B>) {
        return std::is_pointer_v<A> == std::is_pointer_v<B> && sizeof(A) == sizeof(B);
    } else if constexpr (std::is_pointer_v<to_a> || std::is_pointer_v<to_b>) {
        return is_alike<to_a, to_b>();
    } else if constexpr (is_known<to_a>::value && is_known<to_b>::value) {
        return sizeof(to_a) == sizeof(to_b);
    } else {
        return true; /* handles, and what void stands for */
    }
}

template <typename A, typename B> struct are_alike : std::false_type {};
template <typename R, typename S, typename... A, typename... B>
struct are_alike<R (*)(A...), S (*)(B...)> {
    static constexpr bool each() {
        if constexpr (sizeof...(A) == sizeof...(B)) {
            return sizeof(R) == sizeof(S) && (is_alike<A, B>() && ...);
        } else {
            return false;
        }
    }
    static constexpr bool value = each();
};

#define X(group, name, symbol, parameters)                                                         \
    static_assert(                                                                                 \
        are_alike<decltype(&symbol), decltype(cuda_driver::name)>::value,                          \
        #symbol " has other parameters");
CUDA_DRIVER_TABLE(X)
#undef X

#define SAME(ours, theirs) static_assert(int{ours} == int{theirs}, #ours " is not " #theirs)
SAME(CUDA_OK, CUDA_SUCCESS);
SAME(CUDA_NOMEM, CUDA_ERROR_OUT_OF_MEMORY);
SAME(CUDA_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED);
SAME(CUDA_DEINITIALIZED, CUDA_ERROR_DEINITIALIZED);
SAME(CUDA_INVALID_HANDLE, CUDA_ERROR_INVALID_HANDLE);
SAME(CUDA_NOT_READY, CUDA_ERROR_NOT_READY);
SAME(CUDA_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);
SAME(CUDA_ECC_ERROR, CUDA_ERROR_ECC_UNCORRECTABLE);
SAME(CUDA_NVLINK_ERROR, CUDA_ERROR_NVLINK_UNCORRECTABLE);
SAME(CUDA_ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS);
SAME(CUDA_LAUNCH_TIMEOUT, CUDA_ERROR_LAUNCH_TIMEOUT);
SAME(CUDA_CONTEXT_IS_DESTROYED, CUDA_ERROR_CONTEXT_IS_DESTROYED);
SAME(CUDA_DEVICE_ASSERT, CUDA_ERROR_ASSERT);
SAME(CUDA_BROKEN_FIRST, CUDA_ERROR_HARDWARE_STACK_ERROR);
SAME(CUDA_BROKEN_LAST, CUDA_ERROR_LAUNCH_FAILED);
SAME(CUDA_MPS_CLIENT_TERMINATED, CUDA_ERROR_MPS_CLIENT_TERMINATED);
SAME(CUDA_CAPTURE_FIRST, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
SAME(CUDA_CAPTURE_IMPLICIT, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
SAME(CUDA_CAPTURE_LAST, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
#if CUDA_VERSION >= 12080
SAME(CUDA_CONTAINED, CUDA_ERROR_CONTAINED);
SAME(CUDA_TENSOR_MEMORY_LEAK, CUDA_ERROR_TENSOR_MEMORY_LEAK);
#endif
SAME(CUDA_ATTRIBUTE_VMM, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME(CUDA_ATTRIBUTE_POSIX_FD, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
SAME(CUDA_ATTRIBUTE_RDMA_WITH_VMM, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
SAME(CUDA_EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING);
SAME(CUDA_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(CUDA_ALLOCATION_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(CUDA_HANDLE_POSIX_FD, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(CUDA_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(CUDA_ACCESS_READ_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);

#define PLACE(ours, our_field, theirs, their_field)                                                \
    static_assert(                                                                                 \
        offsetof(ours, our_field) == offsetof(theirs, their_field) &&                              \
            sizeof(ours::our_field) == sizeof(theirs::their_field),                                \
        #ours "." #our_field " is elsewhere")
PLACE(cuda_allocation_prop, type, CUmemAllocationProp, type);
PLACE(cuda_allocation_prop, requested_handle_types, CUmemAllocationProp, requestedHandleTypes);
PLACE(cuda_allocation_prop, location.type, CUmemAllocationProp, location.type);
PLACE(cuda_allocation_prop, location.id, CUmemAllocationProp, location.id);
PLACE(
    cuda_allocation_prop, gpu_direct_rdma_capable, CUmemAllocationProp,
    allocFlags.gpuDirectRDMACapable);
PLACE(cuda_access_desc, location.type, CUmemAccessDesc, location.type);
PLACE(cuda_access_desc, location.id, CUmemAccessDesc, location.id);
PLACE(cuda_access_desc, flags, CUmemAccessDesc, flags);
static_assert(sizeof(cuda_allocation_prop) == sizeof(CUmemAllocationProp));
static_assert(sizeof(cuda_access_desc) == sizeof(CUmemAccessDesc));

} // namespace
