#include "fiber.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <pthread.h>
#include <sys/mman.h>
#include <vector>

extern "C" {
WEAK void __asan_unpoison_memory_region(const volatile void* p, size_t bytes);
WEAK void* __tsan_get_current_fiber();
WEAK void* __tsan_create_fiber(unsigned flags);
WEAK void __tsan_destroy_fiber(void* fiber);
}

// emu_switch saves the callee-saved registers of the running fiber, switches stacks, and restores the
// registers of the fiber to resume.
#if defined(__x86_64__)
asm(".text\n.globl emu_switch\n.type emu_switch,@function\nemu_switch:\n"
    " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    " mov %rsp,(%rdi)\n mov %rsi,%rsp\n"
    " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n"
    ".size emu_switch,.-emu_switch\n");
#elif defined(__aarch64__)
asm(".text\n.globl emu_switch\n.type emu_switch,@function\nemu_switch:\n sub sp,sp,#160\n"
    " stp x19,x20,[sp]\n stp x21,x22,[sp,#16]\n stp x23,x24,[sp,#32]\n stp x25,x26,[sp,#48]\n"
    " stp x27,x28,[sp,#64]\n stp x29,x30,[sp,#80]\n stp d8,d9,[sp,#96]\n stp d10,d11,[sp,#112]\n"
    " stp d12,d13,[sp,#128]\n stp d14,d15,[sp,#144]\n mov x9,sp\n str x9,[x0]\n mov sp,x1\n"
    " ldp x19,x20,[sp]\n ldp x21,x22,[sp,#16]\n ldp x23,x24,[sp,#32]\n ldp x25,x26,[sp,#48]\n"
    " ldp x27,x28,[sp,#64]\n ldp x29,x30,[sp,#80]\n ldp d8,d9,[sp,#96]\n ldp d10,d11,[sp,#112]\n"
    " ldp d12,d13,[sp,#128]\n ldp d14,d15,[sp,#144]\n add sp,sp,#160\n ret\n"
    ".size emu_switch,.-emu_switch\n");
#else
#  error "fiber.cpp: no context switch for this processor"
#endif

namespace emu {

static std::mutex lock;
static std::vector<char*> free_list;

static char* map_stack() {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* p = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (p == MAP_FAILED) {
        fprintf(stderr, "hipemu: no memory for another stack of %zu bytes\n", (size_t)STACK_BYTES);
        abort();
    }
    // mprotect fails if the process has too many memory mappings; a stack overflow is then not detected.
    mprotect(p, 4096, PROT_NONE);
    return (char*)p;
}

void fiber_open(Fiber& f) {
    f.stack_bytes = STACK_BYTES;
    std::lock_guard<std::mutex> guard(lock);
    if (free_list.empty()) {
        f.stack = map_stack();
    } else {
        f.stack = free_list.back();
        free_list.pop_back();
    }
}

void fiber_close(Fiber& f) {
    if (f.tsan) __tsan_destroy_fiber(f.tsan);
    std::lock_guard<std::mutex> guard(lock);
    free_list.push_back(f.stack);
    f = Fiber{};
}

void fiber_arm(Fiber& f, unsigned colour, void (*entry)()) {
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(f.stack + 4096, STACK_BYTES - 4096);
    if (__tsan_create_fiber && !f.tsan) f.tsan = __tsan_create_fiber(0);
    f.shadow = nullptr;
    // The stack tops of different fibers have different offsets within a page: with equal offsets, all stacks
    // would compete for a few cache sets.
    void** top = (void**)(f.stack + STACK_BYTES - 64 - (size_t)(colour % 64) * 192);
#if defined(__x86_64__)
    *--top = nullptr;  // After a call the stack pointer is 8 bytes off its 16-byte alignment.
    *--top = (void*)entry;
    for (int i = 0; i < 6; ++i) *--top = nullptr;
#else
    top = (void**)((char*)top - 160);
    memset(top, 0, 160);
    top[11] = (void*)entry;
#endif
    f.saved = top;
}

void fiber_entered() {
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
}

void fiber_host(Fiber& f) {
    f = Fiber{};
    if (__tsan_get_current_fiber) f.tsan = __tsan_get_current_fiber();
    if (!__sanitizer_start_switch_fiber) return;
    pthread_attr_t attributes;
    if (pthread_getattr_np(pthread_self(), &attributes)) return;
    void* bottom = nullptr;
    pthread_attr_getstack(&attributes, &bottom, &f.stack_bytes);
    f.stack = (char*)bottom;
    pthread_attr_destroy(&attributes);
}

bool races_watched() { return __tsan_create_fiber != nullptr; }

}  // namespace emu
