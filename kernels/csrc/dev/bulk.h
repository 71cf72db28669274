// dev/bulk.h - bulk copies (cp.async.bulk) of whole rows to shared memory, and the mbarriers that signal
// completion.
// NVIDIA from sm_90 on, and the emulator, where a copy completes at once.
//
//   Barrier                 an mbarrier in shared memory, 8 bytes; counts arrivals and bytes of copies
//   barrier_init(b, n)      each phase of b needs n arrivals. One thread initialises barriers, then calls
//                           barriers_ready(); all threads then call sync()
//   barrier_expect(b, n)    this thread arrives, and the phase waits for n further bytes of copies
//                           (transaction count)
//   barrier_arrive(b)       this thread arrives
//   barrier_arrive_copied(b)  arrives when all earlier cp_async16 (cp.async) of this thread have completed
//   barrier_wait(b, phase)  waits until the phase of that parity is complete; phases count from 0
//   bulk_copy(to, from, n, b)  copies n bytes; addresses and n are multiples of 16. Issuing one costs its
//                           warp 40 ns, whatever n is: below 2 KiB per copy the issue rate limits throughput,
//                           not memory
//   bulk_copy_once          bulk_copy for data that no other block reads. Its last argument is the L2 cache
//                           policy evict_first, which read_once() returns
//   prefetch_l2(from, n)    prefetches n bytes into L2; addresses and n are multiples of 16
//   dynamic_shared_bytes()  size of the launch's dynamic shared memory
//   named_barrier_sync<ID>(n)  named barrier for n threads of the block, which are whole warps; ID 1..15
#pragma once

#if DEV_EMU
// Emulated mbarrier. A phase is complete when all arrivals have occurred and no byte of a copy is pending.
// The counters are atomic, as in hardware, so that writes before an arrival, and the writes of a copy, are
// visible to threads that have waited for the phase.
struct Barrier { u8 need, left; u16 phase; i32 bytes; };
DEV void barrier_complete_phase(Barrier* b) {
    u8 none = 0;  // Several host threads may find `left` at 0; only one completes the phase.
    if (__atomic_load_n(&b->bytes, __ATOMIC_ACQUIRE)) return;
    if (!__atomic_compare_exchange_n(&b->left, &none, b->need, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return;
    __atomic_add_fetch(&b->phase, 1, __ATOMIC_ACQ_REL);
    emu::note_progress();
}
// Barrier that named_barrier_sync() uses: `bytes` counts the threads that have arrived.
DEV Barrier* named_barrier() { SHARED(Barrier, b, 1); return b; }
DEV void barrier_init(Barrier* b, u32 arrivals) { *b = Barrier{(u8)arrivals, (u8)arrivals, 0, 0}; }
DEV void barriers_ready() { *named_barrier() = Barrier{}; }
DEV void barrier_arrive(Barrier* b) {
    __atomic_sub_fetch(&b->left, 1, __ATOMIC_ACQ_REL);
    barrier_complete_phase(b);
}
DEV void barrier_arrive_copied(Barrier* b) { barrier_arrive(b); }
DEV void barrier_expect(Barrier* b, u32 bytes) {
    __atomic_add_fetch(&b->bytes, (i32)bytes, __ATOMIC_ACQ_REL);
    barrier_arrive(b);
}
DEV void barrier_wait(Barrier* b, u32 phase) {
    while ((__atomic_load_n(&b->phase, __ATOMIC_ACQUIRE) & 1) == phase) pause();
}
DEV u64 read_once() { return 0; }
DEV void bulk_copy(void* to, const void* from, u32 bytes, Barrier* b) {
    __builtin_memcpy(to, from, bytes);
    __atomic_sub_fetch(&b->bytes, (i32)bytes, __ATOMIC_ACQ_REL);
    barrier_complete_phase(b);
}
DEV void bulk_copy_once(void* to, const void* from, u32 bytes, Barrier* b, u64) { bulk_copy(to, from, bytes, b); }
DEV void prefetch_l2(const void* from, u32 bytes) {
    (void)*(const volatile u8*)from;  // Reads both ends, so that a sanitizer detects a bad range.
    (void)((const volatile u8*)from)[bytes - 1];
}
DEV u32 dynamic_shared_bytes() { return emu::self->dynamic_bytes; }
template <u32 ID> DEV void named_barrier_sync(u32 threads) {
    Barrier* b = named_barrier();
    const u16 phase = __atomic_load_n(&b->phase, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&b->bytes, 1, __ATOMIC_ACQ_REL) == (i32)threads) {
        __atomic_store_n(&b->bytes, 0, __ATOMIC_RELEASE);
        __atomic_add_fetch(&b->phase, 1, __ATOMIC_ACQ_REL);
        return emu::note_progress();
    }
    while (__atomic_load_n(&b->phase, __ATOMIC_ACQUIRE) == phase) pause();
}
#else
typedef u64 Barrier;

DEV void barrier_init(Barrier* b, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(shared_address(b)), "r"(arrivals) : "memory");
}
DEV void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory"); }
DEV void barrier_expect(Barrier* b, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(shared_address(b)), "r"(bytes) : "memory");
}
DEV void barrier_arrive(Barrier* b) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(shared_address(b)) : "memory");
}
DEV void barrier_arrive_copied(Barrier* b) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" : : "r"(shared_address(b)) : "memory");
}
DEV void barrier_wait(Barrier* b, u32 phase) {
    asm volatile(
        "{\n\t.reg .pred over;\n\t"
        "again: mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n\t"
        "@over bra done;\n\tbra again;\n\tdone:\n\t}"
        : : "r"(shared_address(b)), "r"(phase) : "memory");
}
DEV u64 read_once() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEV void bulk_copy_once(void* to, const void* from, u32 bytes, Barrier* b, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        : : "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(b)), "l"(policy) : "memory");
}
DEV void bulk_copy(void* to, const void* from, u32 bytes, Barrier* b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 : : "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(b)) : "memory");
}
DEV void prefetch_l2(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(from), "r"(bytes) : "memory");
}
DEV u32 dynamic_shared_bytes() {
    u32 n; asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(n)); return n;
}
template <u32 ID> DEV void named_barrier_sync(u32 threads) {
    asm volatile("bar.sync %0, %1;" : : "n"(ID), "r"(threads) : "memory");
}
#endif
