// fp8_gemm_small_m/rows.h - converts rows of x (up to OWN_ROWS per warp) to f16 and stores them in shared
// memory. With NORM the rows are normalised first. Rows that do not fit the range of f16 are scaled by a
// power of two. All loads are issued before the first use.
#pragma once

enum : u32 { OWN_ROWS = 4 };

// Returns the number of warps that process a row of x. With NORM it equals the number of warps of a block of
// rms_norm, so that the order of additions, and therefore the result of the norm, is bit-identical.
DEV u32 warps_of_row(u32 k) {
    const u32 pieces = k / 8;
    if (!NORM) return COMPUTE_WARPS;
    return ((pieces <= 256 ? pieces : (pieces + 1) / 2) + WARP_SIZE - 1) / WARP_SIZE;
}

// Computes the scale factor of each row of x from its peak (largest magnitude); called when all peaks are in
// shared memory. For a row that must be scaled, calls store_scaled(row, factor), which stores the row again,
// multiplied by the factor.
template <class StoreScaled> DEV void apply_factors(const BlockWork& work, const SharedMemoryLayout& s,
                                                    const StoreScaled& store_scaled) {
    bool any = false;
#pragma unroll 1
    for (u32 row = 0; row < work.m; ++row) {
        float peak = s.peaks[row];
#pragma unroll 1
        for (u32 w = 1; w < warps_of_row(work.k); ++w) peak = fmax_(peak, s.peaks[w * MOST_ROWS + row]);
        const RowScaleFactors factor = row_factor(peak);
        if (tid() == 0) s.factors[row] = factor.down;
        if (!needs_factor(peak)) continue;
        store_scaled(row, factor.up);
        any = true;
    }
    if (any) named_barrier_sync<1>(CONSUMER_THREADS);
}

#if NORM
// The elements of a row that a lane has in registers: at most two vectors of 8 elements.
struct LaneRowPieces { half_x8 v[2]; };
DEV u32 piece_of(u32 k, u32 i) { return (warp_id() % warps_of_row(k) + i * warps_of_row(k)) * WARP_SIZE + lane(); }
DEV LaneRowPieces load_pieces(const half_t* row, u32 k) {
    LaneRowPieces p;
    UNROLL for (u32 i = 0; i < 2; ++i)
        p.v[i] = piece_of(k, i) < k / 8 ? *((const half_x8*)row + piece_of(k, i)) : zero8();
    return p;
}
DEV half_x8 normed(const half_x8& x, const half_x8& w, float scale) {
    half_x8 r;
    UNROLL for (u32 i = 0; i < 8; ++i) r.v[i] = to_half(f32(w.v[i]) * f32(to_half(f32(x.v[i]) * scale)));
    return r;
}

// Normalises rows of x, and stores them in shared memory as f16. `norm`: the norm weights for the columns of
// this lane, loaded before grid_wait().
DEV void stage_x_rows(const BlockWork& work, const SharedMemoryLayout& s, const half_t* x, const LaneRowPieces& norm,
                      u32 x_stride, float eps) {
    const u32 warps = warps_of_row(work.k), groups = COMPUTE_WARPS / warps, member = warp_id() % warps, line = x_line(work.k);
    const u32 from = warp_id() / warps < groups ? warp_id() / warps : work.m;  // Excess warps have no rows.
    LaneRowPieces rows[OWN_ROWS];
    UNROLL for (u32 i = 0; i < OWN_ROWS; ++i)
        if (from + i * groups < work.m) rows[i] = load_pieces(x + (u64)(from + i * groups) * x_stride, work.k);
    UNROLL for (u32 i = 0; i < OWN_ROWS; ++i) {
        if (from + i * groups >= work.m) break;
        float squares = 0.f;
        UNROLL for (u32 p = 0; p < 2; ++p)
            UNROLL for (u32 j = 0; j < 8; ++j) squares = fma_(f32(rows[i].v[p].v[j]), f32(rows[i].v[p].v[j]), squares);
        squares = warp_sum(squares);
        if (lane() == 0) s.squares[member * MOST_ROWS + from + i * groups] = squares;
    }
    named_barrier_sync<1>(CONSUMER_THREADS);
    const auto store = [&](u32 row, const LaneRowPieces& pieces, float up) {
        float parts[COMPUTE_WARPS], peak = 0.f;
        UNROLL for (u32 w = 0; w < COMPUTE_WARPS; ++w) parts[w] = w < warps ? s.squares[w * MOST_ROWS + row] : 0.f;
        float sum = parts[0];
        UNROLL for (u32 w = 1; w < COMPUTE_WARPS; ++w) sum += parts[w];
        const float scale = rsqrt_(sum / (float)work.k + eps);
        UNROLL for (u32 p = 0; p < 2; ++p) {
            if (piece_of(work.k, p) >= work.k / 8) break;
            const half_x8 v = normed(pieces.v[p], norm.v[p], scale);
            peak = peak_of(v, peak);
            *(u32x4*)(s.x + row * line + piece_of(work.k, p) * 16) = scaled_f16(v, up);
        }
        return peak;
    };
    UNROLL for (u32 i = 0; i < OWN_ROWS; ++i) {
        if (from + i * groups >= work.m) break;
        const float peak = warp_max(store(from + i * groups, rows[i], 1.f));
        if (lane() == 0) s.peaks[member * MOST_ROWS + from + i * groups] = peak;
    }
    named_barrier_sync<1>(CONSUMER_THREADS);
    apply_factors(work, s, [&](u32 row, float up) {
        if (row % groups == from) store(row, load_pieces(x + (u64)row * x_stride, work.k), up);
    });
}
#else
// Stores rows of x in shared memory as f16. A thread loads OWN_ROWS vectors of 8 elements at a time: all from
// the same row if M is 1, otherwise one vector from each of OWN_ROWS rows.
DEV void stage_x_rows(const BlockWork& work, const SharedMemoryLayout& s, const half_t* x, u32 x_stride) {
    const u32 pieces = work.k / 8, line = x_line(work.k), spread = work.m == 1 ? (u32)OWN_ROWS : 1u;
    float peaks[OWN_ROWS];
    UNROLL for (u32 i = 0; i < OWN_ROWS; ++i) peaks[i] = 0.f;
#pragma unroll 1
    for (u32 first = tid(); first < pieces; first += spread * CONSUMER_THREADS) {
        half_x8 v[OWN_ROWS];
        UNROLL for (u32 i = 0; i < OWN_ROWS; ++i) {
            const u32 row = work.m == 1 ? 0 : i, piece = work.m == 1 ? first + i * CONSUMER_THREADS : first;
            v[i] = row < work.m && piece < pieces ? *(const half_x8*)(x + (u64)row * x_stride + piece * 8) : zero8();
        }
        UNROLL for (u32 i = 0; i < OWN_ROWS; ++i) {
            const u32 row = work.m == 1 ? 0 : i, piece = work.m == 1 ? first + i * CONSUMER_THREADS : first;
            peaks[i] = peak_of(v[i], peaks[i]);
            if (row < work.m && piece < pieces) *(u32x4*)(s.x + row * line + piece * 16) = scaled_f16(v[i], 1.f);
        }
    }
    if (work.m == 1) peaks[0] = fmax_(fmax_(peaks[0], peaks[1]), fmax_(peaks[2], peaks[3]));
    UNROLL for (u32 i = 0; i < OWN_ROWS; ++i) {
        const float peak = warp_max(peaks[i]);
        if (lane() == 0 && i < work.m) s.peaks[warp_id() * MOST_ROWS + i] = peak;
    }
    named_barrier_sync<1>(CONSUMER_THREADS);
    apply_factors(work, s, [&](u32 row, float up) {
#pragma unroll 1
        for (u32 piece = tid(); piece < pieces; piece += CONSUMER_THREADS)
            *(u32x4*)(s.x + row * line + piece * 16) = scaled_f16(*(const half_x8*)(x + (u64)row * x_stride + piece * 8), up);
    });
}
#endif
