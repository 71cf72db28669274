// fiber.h - fibers: user-space threads, each with its own stack. Stacks and switches are reported to
// AddressSanitizer and ThreadSanitizer if a sanitizer is loaded.
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

// A user-space thread with its own stack, on which one emulated thread runs.
struct Fiber {
    void* saved = nullptr;      // stack pointer while the fiber is suspended
    char* stack = nullptr;      // lowest address; null: not opened, or the host thread's
    size_t stack_bytes = 0;
    void* shadow = nullptr;     // AddressSanitizer's fake stack
    void* tsan = nullptr;       // ThreadSanitizer's fiber
};

enum : size_t { STACK_BYTES = 128 << 10 };

// Gives fiber `f` a stack: one from the free list, or a newly mapped stack with a guard page below it.
void fiber_open(Fiber& f);
// Returns the stack of fiber `f` to the free list. The fiber must not be running.
void fiber_close(Fiber& f);
// Makes the fiber start in `entry` at its next switch. `entry` must not return. `colour` selects the offset
// of the stack top within a page; adjacent fibers should have different values.
void fiber_arm(Fiber& f, unsigned colour, void (*entry)());
// Switches from fiber `from`, which is running, to fiber `to`. `ends`: `from` is never resumed.
inline void fiber_switch(Fiber& from, Fiber& to, bool ends) {
    if (__sanitizer_start_switch_fiber)
        __sanitizer_start_switch_fiber(ends ? nullptr : &from.shadow, to.stack, to.stack_bytes);
    if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(to.tsan, 1 /* orders no memory */);
    emu_switch(&from.saved, to.saved);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(from.shadow, nullptr, nullptr);
}
// Reports to AddressSanitizer that the switch to a new fiber is complete. Must be the first call in the
// fiber's `entry` function.
void fiber_entered();
// Initialises the fiber of the host thread, before its first switch.
void fiber_host(Fiber& f);

// For ThreadSanitizer: what a thread writes before released(order) is visible to another thread after
// acquired(order).
inline void acquired(void* order) {
    if (__tsan_acquire) __tsan_acquire(order);
}
inline void released(void* order) {
    if (__tsan_release) __tsan_release(order);
}
// Whether ThreadSanitizer is loaded.
bool races_watched();

}  // namespace emu
