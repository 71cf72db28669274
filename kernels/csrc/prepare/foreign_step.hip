// foreign_step.hip - converts the arrays of a step of a foreign host (an inference server with its own scheduler) to the inputs of a
// forward pass. CPU reference: cpu/foreign_step.rs (`ForeignStepPreparation`).
//
// prepare_foreign_step  reads ids, positions i32 or i64 [tokens], slots i64 [tokens], row_starts i32 [rows + 1] or null, context_lens
//                       i32 or i64 [rows]; writes ids, positions i32 [tokens], slots i64 [tokens], cu_q i32 [rows + 1], context_lens
//                       i32 [rows]
// Grid: (blocks of 256 elements). Block: 256. Without row_starts, row r has token r alone, and a row whose context length is 0 is
// padding: id 0, position 0, slot -1. The arrays of the host have undefined values there.
// Roofline: bound by the latency of one load.
#include "dev.h"

// Element i of an array of 32-bit or 64-bit integers.
DEV i64 index_at(const void* x, u32 i, u32 wide) { return wide ? ((const i64*)x)[i] : (i64)((const i32*)x)[i]; }

KERNEL(256)
prepare_foreign_step(i32* ids, i32* positions, i64* slots, i32* cu_q, i32* context_lens, const void* host_ids,
                     const void* host_positions, const i64* host_slots, const i32* row_starts, const void* host_context_lens,
                     u32 tokens, u32 rows, u32 wide_ids, u32 wide_positions, u32 wide_context_lens) {
    grid_wait();
    grid_launch_dependents();
    const u32 i = bid_x() * bdim() + tid();
    if (i < tokens) {
        const bool padding = !row_starts && index_at(host_context_lens, i, wide_context_lens) == 0;
        ids[i] = padding ? 0 : (i32)index_at(host_ids, i, wide_ids);
        positions[i] = padding ? 0 : (i32)index_at(host_positions, i, wide_positions);
        slots[i] = padding ? -1 : host_slots[i];
    }
    if (i < rows) context_lens[i] = (i32)index_at(host_context_lens, i, wide_context_lens);
    if (i <= rows) cu_q[i] = row_starts ? row_starts[i] : (i32)i;
}
EXPORT(prepare_foreign_step)
