// hip_module.cpp - modules. A module is either a host shared object with kernel entry points named
// emu_kernel_*, or a code object with machine code (isa/).
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <elf.h>
#include <unistd.h>

#include "hip.h"
#include "isa/launch.h"
#include "settings.h"

using namespace emu;

namespace emu {

// A loaded module: a shared object of the host, or a code object whose machine code is emulated.
struct Module {
    void* library = nullptr;
    std::shared_ptr<isa::CodeObject> code;   // null: a shared object of the host
    std::string file;
    std::vector<std::unique_ptr<struct Function>> functions;
};

// A kernel of a module.
struct Function {
    bool (*entry)(const Launch*) = nullptr;
    const isa::Kernel* kernel = nullptr;     // null: `entry` runs
    Launch::KernelAttributes sizes;
};

// Returns the size in bytes of the ELF shared object at `image`, because the HIP call has no size argument.
// Returns 0 if `image` is not a shared object.
static size_t image_bytes(const u8* image) {
    if (!image || memcmp(image, ELFMAG, SELFMAG) != 0 || image[EI_CLASS] != ELFCLASS64) return 0;
    Elf64_Ehdr head;
    memcpy(&head, image, sizeof head);
    if (head.e_type != ET_DYN) return 0;
    size_t end = head.e_shoff + (size_t)head.e_shnum * head.e_shentsize;
    for (unsigned i = 0; i < head.e_phnum; ++i) {
        Elf64_Phdr segment;
        memcpy(&segment, image + head.e_phoff + (size_t)i * head.e_phentsize, sizeof segment);
        end = std::max(end, (size_t)(segment.p_offset + segment.p_filesz));
    }
    return end;
}

static bool write_file(const u8* image, size_t bytes, std::string& path) {
    const char* folder = getenv("TMPDIR");
    path = std::string(folder && *folder ? folder : "/tmp") + "/hipemu-XXXXXX";
    const int file = mkstemp(path.data());
    if (file < 0) return false;
    bool good = true;
    for (size_t at = 0; at < bytes && good;) {
        const ssize_t n = write(file, image + at, bytes - at);
        good = n > 0;
        at += good ? (size_t)n : 0;
    }
    close(file);
    return good;
}

// Copies of a launch's arguments: the caller's memory may be freed before a captured graph is replayed.
struct LaunchArguments {
    std::vector<std::vector<u8>> bytes;
    std::vector<void*> addresses;
    LaunchArguments(const Launch::KernelAttributes& sizes, void** args) {
        for (u32 i = 0; i < sizes.count; ++i) bytes.emplace_back((u8*)args[i], (u8*)args[i] + sizes.bytes[i]);
        for (auto& b : bytes) addresses.push_back(b.data());
    }
};

static bool is_code_object(const u8* image) {
    Elf64_Ehdr head;
    memcpy(&head, image, sizeof head);
    return head.e_machine == 224;  // EM_AMDGPU
}

static int load_code(const u8* image, size_t bytes, Module& module) {
    try {
        module.code = isa::load(image, bytes);
    } catch (const isa::EmulationFault& f) {
        fprintf(stderr, "hipemu: %s\n", f.text.c_str());
        return INVALID_IMAGE;
    }
    return OK;
}

static int load_library(const u8* image, size_t bytes, Module& module) {
    if (!write_file(image, bytes, module.file)) return OUT_OF_MEMORY;
    module.library = dlopen(module.file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!module.library) fprintf(stderr, "hipemu: %s\n", dlerror());
    // With a sanitizer, the file is not deleted, because the sanitizer reads it to report an error.
    if (!settings().keep && !settings().sanitize) unlink(module.file.c_str());
    return module.library ? OK : INVALID_IMAGE;
}

// Memory that kernels may access: device memory of the current device and its peers, and pinned host memory.
static isa::AddressSpace accessible_memory() {
    Device& d = device();
    isa::AddressSpace space;
    space.has_foreign_memory = d.has_foreign_memory;
    for (const auto& [start, memory] : d.memory) space.add((void*)start, memory.bytes);
    for (const auto& [start, bytes] : d.pinned) space.add((void*)start, bytes);
    for (const auto& [start, bytes] : memory_of_peers(d)) space.add((void*)start, bytes);
    return space;
}

static bool run_function(const Function& f, const Launch& launch) {
    return f.kernel ? isa::launch(*f.kernel, launch, accessible_memory()) : f.entry(&launch);
}

// Returns a device whose memory is passed to the kernel although the current device has no peer access to it;
// null: none. Every 64-bit word of the arguments that equals an address in device memory is treated as a
// pointer, because other values are unlikely to be in this range.
static const Device* inaccessible_device(const LaunchArguments& arguments) {
    const Device& d = device();
    for (const auto& argument : arguments.bytes)
        for (size_t at = 0; at + 8 <= argument.size(); at += 8) {
            const void* p;
            memcpy(&p, argument.data() + at, 8);
            const Device* owner = owner_of(p);
            if (owner && owner != &d && !d.peers.count(owner->ordinal)) return owner;
        }
    return nullptr;
}

static void run_kernel(Function* f, Launch launch, LaunchArguments& arguments) {
    if (const Device* other = inaccessible_device(arguments)) {
        fprintf(stderr, "hipemu: memory access fault: a kernel of device %d accesses memory of device %d without peer access\n",
                device().ordinal, other->ordinal);
        device().failure_code = ILLEGAL_ADDRESS;
        return;
    }
    launch.args = arguments.addresses.data();
    if (!run_function(*f, launch)) device().failure_code = LAUNCH_FAILURE;
}

}  // namespace emu

HIP int hipDeviceGetAttribute(int* value, int attribute, int device);

HIP int hipModuleLoadData(Module** out, const void* image) {
    Guard guard(device().lock);
    *out = nullptr;
    if (int code = reject_while_capturing()) return code;
    const size_t bytes = image_bytes((const u8*)image);
    if (bytes == 0) return INVALID_IMAGE;
    auto module = std::make_unique<Module>();
    const auto load = is_code_object((const u8*)image) ? load_code : load_library;
    if (int code = load((const u8*)image, bytes, *module)) return code;
    *out = module.release();
    return OK;
}

HIP int hipModuleUnload(Module* module) {
    Guard guard(device().lock);
    if (!module) return INVALID_HANDLE;
    drain_all();
    if (module->library) dlclose(module->library);
    delete module;
    return OK;
}

HIP int hipModuleGetFunction(Function** out, Module* module, const char* name) {
    Guard guard(device().lock);
    *out = nullptr;
    if (!module || !name) return INVALID_HANDLE;
    auto function = std::make_unique<Function>();
    if (module->code) {
        const auto found = module->code->kernels.find(name);
        if (found == module->code->kernels.end()) return NOT_FOUND;
        function->kernel = &found->second;
        function->sizes = isa::sizes_of(found->second);
    } else {
        void* symbol = dlsym(module->library, (std::string("emu_kernel_") + name).c_str());
        if (!symbol) return NOT_FOUND;
        function->entry = (bool (*)(const Launch*))symbol;
        Launch query{};
        query.sizes = &function->sizes;
        function->entry(&query);
    }
    *out = function.get();
    module->functions.push_back(std::move(function));
    return OK;
}

// Supported attributes: 0 (maximum number of threads per block), and 3 (spilled bytes, which are 0 on a CPU).
HIP int hipFuncGetAttribute(int* value, int attribute, Function* function) {
    if (!function) return INVALID_HANDLE;
    *value = attribute == 0 ? (int)function->sizes.max_threads : 0;
    return attribute == 0 || attribute == 3 ? OK : NOT_SUPPORTED;
}

// The occupancy is 1, because an emulated SM runs one block at a time, or 0 if the kernel does not support
// `threads` threads per block.
HIP int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function* function, int threads, size_t) {
    if (!function) return INVALID_HANDLE;
    *blocks = threads <= (int)function->sizes.max_threads ? 1 : 0;
    return OK;
}

HIP int hipModuleLaunchKernel(Function* f, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 shared_bytes,
                              Stream* s, void** args, void**) {
    Guard guard(device().lock);
    if (!f || (!args && f->sizes.count)) return INVALID_HANDLE;
    if (!gx || !gy || !gz || !bx || by != 1 || bz != 1 || gy > 65535 || gz > 65535) return INVALID_CONFIGURATION;
    if (bx > f->sizes.max_threads || shared_bytes > (u32)shared_limit(f->sizes.wave)) return INVALID_CONFIGURATION;
    auto owned = std::make_shared<LaunchArguments>(f->sizes, args);
    const Launch launch{{gx, gy, gz}, bx, shared_bytes, nullptr, nullptr};
    return put(s, [=] { run_kernel(f, launch, *owned); });
}

HIP int hipModuleLaunchCooperativeKernel(Function* f, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz,
                                         u32 shared_bytes, Stream* s, void** args) {
    return hipModuleLaunchKernel(f, gx, gy, gz, bx, by, bz, shared_bytes, s, args, nullptr);
}
