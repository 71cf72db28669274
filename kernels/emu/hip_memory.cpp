// hip_memory.cpp - device and pinned memory, copies and fills.
#include <cstdlib>
#include <cstring>

#include "hip.h"
#include "settings.h"

using namespace emu;

// Fresh memory up to this size is filled with NaN; more would only cost the host's memory.
static const size_t POISON_LIMIT_BYTES = 64 << 20;

namespace emu {

bool is_device(const void* p, size_t bytes) {
    auto& memory = device().memory;
    auto after = memory.upper_bound((uintptr_t)p);
    if (after == memory.begin()) return false;
    const auto& [start, m] = *--after;
    return (uintptr_t)p - start <= m.bytes && bytes <= m.bytes - ((uintptr_t)p - start);
}

bool is_pinned(const void* p, size_t bytes) {
    auto& pinned = device().pinned;
    auto after = pinned.upper_bound((uintptr_t)p);
    if (after == pinned.begin()) return false;
    const auto& [start, size] = *--after;
    return (uintptr_t)p - start <= size && bytes <= size - ((uintptr_t)p - start);
}

}  // namespace emu

HIP int hipMalloc(void** out, size_t bytes) {
    Device& d = device();
    Guard guard(d.lock);
    if (d.lost) return d.lost;
    if (int code = refuse_while_capturing()) return code;
    *out = nullptr;
    if (bytes == 0) return OK;
    if (bytes > settings().memory_bytes - d.bytes_used) return OUT_OF_MEMORY;
    void* p = nullptr;
    // The exact size, so that AddressSanitizer sees the first byte too many.
    if (posix_memalign(&p, 256, bytes)) return OUT_OF_MEMORY;
    if (bytes <= POISON_LIMIT_BYTES) memset(p, 0xff, bytes);
    d.memory[(uintptr_t)p] = {bytes, p};
    d.bytes_used += bytes;
    *out = p;
    return OK;
}

HIP int hipFree(void* p) {
    Device& d = device();
    Guard guard(d.lock);
    if (!p) return OK;
    if (int code = refuse_while_capturing()) return code;
    auto found = d.memory.find((uintptr_t)p);
    if (found == d.memory.end()) return INVALID_VALUE;
    drain_all();  // Freeing waits for the device.
    d.bytes_used -= found->second.bytes;
    d.memory.erase(found);
    free(p);
    return OK;
}

HIP int hipHostMalloc(void** out, size_t bytes, unsigned) {
    Device& d = device();
    Guard guard(d.lock);
    if (int code = refuse_while_capturing()) return code;
    if (posix_memalign(out, 4096, bytes ? bytes : 1)) return OUT_OF_MEMORY;
    memset(*out, 0xff, bytes < POISON_LIMIT_BYTES ? bytes : 0);
    d.pinned[(uintptr_t)*out] = bytes;
    return OK;
}

HIP int hipHostFree(void* p) {
    Device& d = device();
    Guard guard(d.lock);
    if (!p) return OK;
    if (int code = refuse_while_capturing()) return code;
    if (!d.pinned.erase((uintptr_t)p)) return INVALID_VALUE;
    drain_all();
    free(p);
    return OK;
}

HIP int hipMemGetInfo(size_t* available, size_t* total) {
    Device& d = device();
    Guard guard(d.lock);
    *total = settings().memory_bytes;
    *available = *total - d.bytes_used;
    return d.lost;
}

HIP int hipMemcpyHtoDAsync(void* to, const void* from, size_t bytes, Stream* s) {
    Guard guard(device().lock);
    if (!is_device(to, bytes)) return INVALID_VALUE;
    // Pageable memory is read before the call returns; pinned memory when the copy's turn comes.
    if (!(s && s->capture) && !is_pinned(from, bytes) && settings().lazy) {
        auto taken = std::make_shared<std::vector<u8>>((const u8*)from, (const u8*)from + bytes);
        return put(s, [=] { memcpy(to, taken->data(), bytes); });
    }
    return put(s, [=] { memcpy(to, from, bytes); });
}

HIP int hipMemcpyDtoHAsync(void* to, const void* from, size_t bytes, Stream* s) {
    Guard guard(device().lock);
    if (!is_device(from, bytes)) return INVALID_VALUE;
    if (int code = put(s, [=] { memcpy(to, from, bytes); })) return code;
    if (!(s && s->capture) && !is_pinned(to, bytes)) drain(s);
    return OK;
}

HIP int hipMemcpyDtoDAsync(void* to, const void* from, size_t bytes, Stream* s) {
    Guard guard(device().lock);
    if (!is_device(to, bytes) || !is_device(from, bytes)) return INVALID_VALUE;
    return put(s, [=] { memmove(to, from, bytes); });
}

HIP int hipMemsetD8Async(void* to, u8 byte, size_t bytes, Stream* s) {
    Guard guard(device().lock);
    if (!is_device(to, bytes)) return INVALID_VALUE;
    return put(s, [=] { memset(to, byte, bytes); });
}

HIP int hipMemsetD32Async(void* to, int word, size_t words, Stream* s) {
    Guard guard(device().lock);
    if (!is_device(to, 4 * words)) return INVALID_VALUE;
    return put(s, [=] { for (size_t i = 0; i < words; ++i) ((int*)to)[i] = word; });
}
