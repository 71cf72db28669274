// embed.hip - row gather by index: embedding lookup and row gathers. CPU reference: cpu/embed.rs,
// cpu/elementwise.rs (gather).
//
// copy_rows  y[i] = row ids[i] - first of x, or zeros where x has no such row.
//            y [n, bytes], x [rows, bytes], ids i32 [n]: rows of any element type with an even number of
//            bytes.
// Grid: n. Block: up to 256 threads.
// Rounding: none, bytes are copied. Roofline: 2 n bytes over memory bandwidth; n = 1 is bound by the latency
// of two dependent loads. Rows with length, stride and address that are multiples of 16 are copied 16 bytes
// at a time.
#include "dev.h"

template <class V> DEV void copy_row(u8* to, const u8* from, u32 bytes, bool present) {
    const u32 first = tid() * (u32)sizeof(V), step = bdim() * (u32)sizeof(V);
    if (present) {
        for (u32 at = first; at < bytes; at += step) *(V*)(to + at) = *(const V*)(from + at);
    } else {
        for (u32 at = first; at < bytes; at += step) *(V*)(to + at) = V{};
    }
}

KERNEL(256)
copy_rows(u8* y, const u8* x, const i32* ids, u32 y_stride_bytes, u32 x_stride_bytes, u32 bytes, u32 first, u32 rows) {
    grid_wait();
    grid_launch_dependents();
    const i64 row = (i64)ids[bid_x()] - (i64)first;
    const bool present = row >= 0 && row < (i64)rows;
    u8* to = y + (u64)bid_x() * y_stride_bytes;
    const u8* from = x + (present ? (u64)row * x_stride_bytes : 0);
    const u64 unaligned = ((u64)y | (u64)x | y_stride_bytes | x_stride_bytes | bytes) & 15;
    if (unaligned == 0)
        copy_row<u32x4>(to, from, bytes, present);
    else
        copy_row<u16>(to, from, bytes, present);
}
EXPORT(copy_rows)
