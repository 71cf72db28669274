/* A GPU driver library that wraps the real one and injects faults. A fault happens once, when a file of its name is in
   the folder that the environment variable FAULTY_DRIVER names:

   wedge            a kernel before the next graph launch never ends, nor does any later work on its stream
   break            a kernel before the next graph launch fails, and with it the device for the rest of this process
   full             the next allocation fails, because all device memory is in use
   full-recording   all device memory is in use when the next graph capture begins

   Compiled with -DREAL="path of the real library", with -DCUDA for NVIDIA, and linked against the real library, which
   resolves all other functions. With NVIDIA's driver every fault is the device's own; with HIP, where the real library
   is an emulator, the graph launch itself does not return, or returns an error. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef int Code;
typedef void *Ptr;

#ifdef CUDA
#define NAME(hip, cuda) #cuda
#define FUNCTION(hip, cuda) cuda
#else
#define NAME(hip, cuda) #hip
#define FUNCTION(hip, cuda) hip
#endif

static void *real(const char *name) {
    static void *library;
    if (!library) library = dlopen(REAL, RTLD_NOW | RTLD_LOCAL);
    void *found = library ? dlsym(library, name) : NULL;
    if (!found) {
        fprintf(stderr, "faulty driver: no %s in %s\n", name, REAL);
        abort();
    }
    return found;
}

#define REAL_OF(hip, cuda, ...) ((Code(*)(__VA_ARGS__))real(NAME(hip, cuda)))

/* Whether a test has requested the fault; removes its file. */
static int asked(const char *fault) {
    const char *folder = getenv("FAULTY_DRIVER");
    char path[4096];
    if (!folder || snprintf(path, sizeof path, "%s/%s", folder, fault) >= (int)sizeof path) return 0;
    return unlink(path) == 0;
}

/* Allocates all device memory in blocks of at least 1 MiB. */
static void fill_memory(void) {
    size_t free_bytes = 0, total_bytes = 0;
    REAL_OF(hipMemGetInfo, cuMemGetInfo_v2, size_t *, size_t *)(&free_bytes, &total_bytes);
    for (size_t bytes = free_bytes; bytes >= 1 << 20;) {
        Ptr memory;
        if (REAL_OF(hipMalloc, cuMemAlloc_v2, Ptr *, size_t)(&memory, bytes)) bytes /= 2;
    }
    REAL_OF(hipMemGetInfo, cuMemGetInfo_v2, size_t *, size_t *)(&free_bytes, &total_bytes);
    fprintf(stderr, "faulty driver: %zu of %zu bytes are free\n", free_bytes, total_bytes);
}

#ifdef CUDA
static const char KERNELS[] =
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry wedge() {\nagain:\n bra again;\n}\n"
    ".visible .entry breaks() {\n trap;\n}\n";

static Code launch_fault(const char *name, Ptr stream) {
    Ptr module, function;
    Code code = ((Code(*)(Ptr *, const void *))real("cuModuleLoadData"))(&module, KERNELS);
    if (!code) code = ((Code(*)(Ptr *, Ptr, const char *))real("cuModuleGetFunction"))(&function, module, name);
    typedef Code Launch(Ptr, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Ptr, Ptr *, Ptr *);
    if (!code) code = ((Launch *)real("cuLaunchKernel"))(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
    fprintf(stderr, code ? "faulty driver: no %s: %d\n" : "faulty driver: %s\n", name, code);
    return code;
}

static Code before_launch(Ptr stream) {
    if (asked("wedge")) return launch_fault("wedge", stream);
    return asked("break") ? launch_fault("breaks", stream) : 0;
}
#else
static Code before_launch(Ptr stream) {
    static int broken;
    (void)stream;
    if (asked("wedge")) {
        fprintf(stderr, "faulty driver: wedge\n");
        for (;;) pause();
    }
    if (asked("break")) {
        fprintf(stderr, "faulty driver: breaks\n");
        broken = 719;
    }
    return broken;
}
#endif

Code FUNCTION(hipGraphLaunch, cuGraphLaunch)(Ptr graph, Ptr stream) {
    Code code = before_launch(stream);
    return code ? code : REAL_OF(hipGraphLaunch, cuGraphLaunch, Ptr, Ptr)(graph, stream);
}

Code FUNCTION(hipMalloc, cuMemAlloc_v2)(Ptr *memory, size_t bytes) {
    if (asked("full")) fill_memory();
    return REAL_OF(hipMalloc, cuMemAlloc_v2, Ptr *, size_t)(memory, bytes);
}

Code FUNCTION(hipStreamBeginCapture, cuStreamBeginCapture_v2)(Ptr stream, int mode) {
    if (asked("full-recording")) fill_memory();
    return REAL_OF(hipStreamBeginCapture, cuStreamBeginCapture_v2, Ptr, int)(stream, mode);
}
