// fiber.h - stacks and switches between them, known to AddressSanitizer and ThreadSanitizer when those are in the process.
#pragma once
#include <cstddef>

#define WEAK __attribute__((weak))
extern "C" {
__attribute__((visibility("hidden"))) void emu_switch(void** save, void* to);
WEAK void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t bytes);
WEAK void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* bytes);
WEAK void __tsan_switch_to_fiber(void* fiber, unsigned flags);
WEAK void __tsan_acquire(void* p);
WEAK void __tsan_release(void* p);
}

namespace emu {

struct Fiber {
    void* saved = nullptr;      // stack pointer while it does not run
    char* stack = nullptr;      // lowest address; null: the host thread's own
    size_t stack_bytes = 0;
    void* shadow = nullptr;     // AddressSanitizer's fake stack
    void* tsan = nullptr;       // ThreadSanitizer's fiber
};

enum : size_t { STACK_BYTES = 128 << 10 };

// Takes a stack from those at rest, or maps one with a guard page below it.
void fiber_open(Fiber& f);
// Gives it back. The fiber must not be the running one.
void fiber_close(Fiber& f);
// Makes the fiber begin in `entry` at its next switch. Entry never returns. Neighbours differ in `colour`.
void fiber_arm(Fiber& f, unsigned colour, void (*entry)());
// Leaves `from` and goes on in `to`. `ends`: nobody comes back to `from`.
inline void fiber_switch(Fiber& from, Fiber& to, bool ends) {
    if (__sanitizer_start_switch_fiber)
        __sanitizer_start_switch_fiber(ends ? nullptr : &from.shadow, to.stack, to.stack_bytes);
    if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to.tsan, 1 /* orders no memory */);
    emu_switch(&from.saved, to.saved);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(from.shadow, nullptr, nullptr);
}
// First call in a fiber's entry.
void fiber_entered();
// The fiber of the host thread, before it switches for the first time.
void fiber_host(Fiber& f);

// Memory that one thread wrote before released(o) is seen by another after acquired(o); for ThreadSanitizer.
inline void acquired(void* order) {
    if (__tsan_acquire) __tsan_acquire(order);
}
inline void released(void* order) {
    if (__tsan_release) __tsan_release(order);
}
// Whether ThreadSanitizer is in the process.
bool races_watched();

}  // namespace emu
