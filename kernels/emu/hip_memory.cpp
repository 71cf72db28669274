// hip_memory.cpp - device and pinned memory, copies and fills.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "hip.h"
#include "settings.h"

using namespace emu;

// New allocations up to this size are filled with NaN. Larger allocations are not, because writing them would
// commit too much host memory.
static const size_t POISON_LIMIT_BYTES = 64 << 20;

namespace emu {

// Allocations of all devices by address. This map has its own lock: the locks of the devices cannot be used,
// because a device's lock is held while a kernel of the device waits for another device.
struct Allocations {
    // Size of an allocation, and the device that owns it.
    struct Allocation { size_t bytes; const Device* owner; };
    std::mutex lock;
    std::map<uintptr_t, Allocation> by_address;
};
static Allocations& allocations() {
    static auto* const all = new Allocations;
    return *all;
}

// Registers an allocation of the current device.
static void add_memory(void* p, Memory memory) {
    Device& d = device();
    d.memory[(uintptr_t)p] = memory;
    d.bytes_used += memory.bytes;
    std::lock_guard<std::mutex> guard(allocations().lock);
    allocations().by_address[(uintptr_t)p] = {memory.bytes, &d};
}

const Device* owner_of(const void* p) {
    std::lock_guard<std::mutex> guard(allocations().lock);
    auto& all = allocations().by_address;
    auto after = all.upper_bound((uintptr_t)p);
    if (after == all.begin()) return nullptr;
    const auto& [start, allocation] = *--after;
    return (uintptr_t)p - start < allocation.bytes ? allocation.owner : nullptr;
}

std::map<uintptr_t, size_t> memory_of_peers(const Device& d) {
    std::map<uintptr_t, size_t> found;
    std::lock_guard<std::mutex> guard(allocations().lock);
    for (const auto& [start, allocation] : allocations().by_address)
        if (d.peers.count(allocation.owner->ordinal)) found[start] = allocation.bytes;
    return found;
}

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

void TimedFills::add(u64 filled) {
    std::lock_guard<std::mutex> guard(lock);
    bytes += filled;
}
void TimedFills::note_timing() {
    std::lock_guard<std::mutex> guard(lock);
    fewest_bytes = std::min(fewest_bytes, bytes);
    bytes = 0;
    ++timings;
}
TimedFills& timed_fills() {
    static auto* const fills = new TimedFills;
    return *fills;
}

}  // namespace emu

// For tests: the number of calls of hipEventElapsedTime, and the fewest bytes that were filled before one of them.
HIP void hipemuTimedFills(u64* timings, u64* fewest_bytes) {
    std::lock_guard<std::mutex> guard(timed_fills().lock);
    *timings = timed_fills().timings;
    *fewest_bytes = timed_fills().fewest_bytes;
}

HIP int hipMalloc(void** out, size_t bytes) {
    Device& d = device();
    Guard guard(d.lock);
    if (d.failure_code) return d.failure_code;
    if (int code = reject_while_capturing()) return code;
    *out = nullptr;
    if (bytes == 0) return OK;
    if (bytes > settings().memory_bytes - d.bytes_used) return OUT_OF_MEMORY;
    void* p = nullptr;
    // The allocation has exactly the requested size, so that AddressSanitizer detects an access to the first
    // byte after its end.
    if (posix_memalign(&p, 256, bytes)) return OUT_OF_MEMORY;
    if (bytes <= POISON_LIMIT_BYTES) memset(p, 0xff, bytes);
    add_memory(p, {bytes});
    *out = p;
    return OK;
}

HIP int hipFree(void* p) {
    Device& d = device();
    Guard guard(d.lock);
    if (!p) return OK;
    if (int code = reject_while_capturing()) return code;
    auto found = d.memory.find((uintptr_t)p);
    if (found == d.memory.end()) return INVALID_VALUE;
    drain_all();  // As on hardware, freeing waits for all streams.
    const Memory freed = found->second;
    d.bytes_used -= freed.bytes;
    d.memory.erase(found);
    {
        std::lock_guard<std::mutex> guard_all(allocations().lock);
        allocations().by_address.erase((uintptr_t)p);
    }
    if (freed.file < 0) {
        free(p);
    } else {
        munmap(p, freed.bytes);
        close(freed.file);
    }
    return OK;
}

// Flag 3 (uncached) allocates memory that other processes on the host can open through an IPC handle.
HIP int hipExtMallocWithFlags(void** out, size_t bytes, unsigned flags) {
    if (flags != 3) return flags ? NOT_SUPPORTED : hipMalloc(out, bytes);
    Device& d = device();
    Guard guard(d.lock);
    if (d.failure_code) return d.failure_code;
    if (int code = reject_while_capturing()) return code;
    *out = nullptr;
    if (bytes == 0) return OK;
    if (bytes > settings().memory_bytes - d.bytes_used) return OUT_OF_MEMORY;
    const int file = memfd_create("hipemu-memory", MFD_CLOEXEC);
    void* p = MAP_FAILED;
    if (file >= 0 && ftruncate(file, (off_t)bytes) == 0)
        p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (p == MAP_FAILED) {
        if (file >= 0) close(file);
        return OUT_OF_MEMORY;
    }
    if (bytes <= POISON_LIMIT_BYTES) memset(p, 0xff, bytes);
    add_memory(p, {bytes, file});
    *out = p;
    return OK;
}

namespace {

// Content of a hipIpcMemHandle_t: size of the allocation, and the process and file that back it.
struct IpcHandle {
    u64 bytes;
    int process, file;
    u8 rest[48];
};
static_assert(sizeof(IpcHandle) == 64, "the size that drivers have agreed on");

}  // namespace

HIP int hipIpcGetMemHandle(IpcHandle* out, void* p) {
    Device& d = device();
    Guard guard(d.lock);
    auto found = d.memory.find((uintptr_t)p);
    if (found == d.memory.end() || found->second.file < 0) return INVALID_VALUE;
    *out = {found->second.bytes, getpid(), found->second.file, {}};
    return OK;
}

// Opening a handle in the process that allocated the memory is an error, as in the HIP and CUDA drivers,
// because that process already has an address of the memory.
HIP int hipIpcOpenMemHandle(void** out, IpcHandle handle, unsigned flags) {
    *out = nullptr;
    if (flags != 1) return INVALID_VALUE;
    if (handle.process == getpid()) return INVALID_CONTEXT;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.process, handle.file);
    const int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return INVALID_HANDLE;
    void* p = mmap(nullptr, handle.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (p == MAP_FAILED) return OUT_OF_MEMORY;
    Guard guard(device().lock);
    device().has_foreign_memory = true;
    *out = p;
    return OK;
}

HIP int hipHostMalloc(void** out, size_t bytes, unsigned) {
    Device& d = device();
    Guard guard(d.lock);
    if (int code = reject_while_capturing()) return code;
    if (posix_memalign(out, 4096, bytes ? bytes : 1)) return OUT_OF_MEMORY;
    memset(*out, 0xff, bytes < POISON_LIMIT_BYTES ? bytes : 0);
    d.pinned[(uintptr_t)*out] = bytes;
    return OK;
}

HIP int hipHostFree(void* p) {
    Device& d = device();
    Guard guard(d.lock);
    if (!p) return OK;
    if (int code = reject_while_capturing()) return code;
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
    return d.failure_code;
}

HIP int hipMemcpyHtoDAsync(void* to, const void* from, size_t bytes, Stream* s) {
    Guard guard(device().lock);
    if (!is_device(to, bytes)) return INVALID_VALUE;
    // The source of the copy is read before this call returns if it is pageable memory, and when the copy
    // executes if it is pinned memory.
    if (!(s && s->capture) && !is_pinned(from, bytes) && settings().lazy) {
        auto copied = std::make_shared<std::vector<u8>>((const u8*)from, (const u8*)from + bytes);
        return put(s, [=] { memcpy(to, copied->data(), bytes); });
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
    return put(s, [=] {
        memset(to, byte, bytes);
        timed_fills().add(bytes);
    });
}

HIP int hipMemsetD32Async(void* to, int word, size_t words, Stream* s) {
    Guard guard(device().lock);
    if (!is_device(to, 4 * words)) return INVALID_VALUE;
    return put(s, [=] {
        for (size_t i = 0; i < words; ++i) ((int*)to)[i] = word;
        timed_fills().add(4 * words);
    });
}
