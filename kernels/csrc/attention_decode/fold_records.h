// attention_decode/fold_records.h - merges the records of a query's splits into one. The includer defines D,
// RECORD, CHANNELS, SPREAD and AHEAD: merge_records.h, or mla_decode/records.h.
#pragma once

// A lane has CHANNELS channels, in pieces of PIECE; the pieces of successive lanes are contiguous, so that a
// warp's loads are coalesced into whole cache lines.
enum : u32 { PIECE = CHANNELS < 4 ? CHANNELS : 4 };
// A lane's output channels of a split record.
struct LanePartialOutput { float v[CHANNELS]; };
struct alignas(PIECE * 4) ChannelPiece { float v[PIECE]; };
DEV u32 folded_channel(u32 c) { return c / PIECE * PIECE * WARP_SIZE + lane() * PIECE + c % PIECE; }
DEV LanePartialOutput read_channels(const float* from) {
    LanePartialOutput r;
    UNROLL for (u32 c = 0; c < CHANNELS; c += PIECE) {
        const ChannelPiece piece = *(const ChannelPiece*)(from + folded_channel(c));
        UNROLL for (u32 i = 0; i < PIECE; ++i) r.v[c + i] = piece.v[i];
    }
    return r;
}
DEV void write_channels(float* to, const LanePartialOutput& from) {
    UNROLL for (u32 c = 0; c < CHANNELS; c += PIECE) {
        ChannelPiece piece;
        UNROLL for (u32 i = 0; i < PIECE; ++i) piece.v[i] = from.v[c + i];
        *(ChannelPiece*)(to + folded_channel(c)) = piece;
    }
}

// Several split records of one query merged into one: the lane's channels, maximum score and sum of
// probabilities.
struct FoldedRecord {
    LanePartialOutput value;
    float max, sum;
};

// Merges the records first, first + SPREAD, first + 2 SPREAD, and so on below `count`, of one query; records
// are `stride` elements apart. Every lane must call it.
DEV FoldedRecord folded(const float* records, u32 first, u32 count, u32 stride) {
    LanePartialOutput value{};
    float max = NO_SCORE, sum = 0.f;
    for (u32 from = first; from < count; from += AHEAD * SPREAD) {
        LanePartialOutput part[AHEAD];
        f32x2 stats[AHEAD];
        UNROLL for (u32 i = 0; i < AHEAD; ++i) {
            const u32 at = from + i * SPREAD;
            const float* record = records + (at < count ? at : first) * stride;
            part[i] = read_channels(record);
            stats[i] = *(const f32x2*)(record + D);
            if (at >= count) stats[i] = f32x2{{NO_SCORE, 0.f}};
        }
        float new_max = max;
        UNROLL for (u32 i = 0; i < AHEAD; ++i) new_max = fmax_(new_max, stats[i].v[0]);
        const float rescale = exp2_(max - new_max);
        UNROLL for (u32 c = 0; c < CHANNELS; ++c) value.v[c] *= rescale;
        sum *= rescale;
        max = new_max;
        UNROLL for (u32 i = 0; i < AHEAD; ++i) {
            const float weight = exp2_(stats[i].v[0] - max);
            sum = fma_(weight, stats[i].v[1], sum);
            UNROLL for (u32 c = 0; c < CHANNELS; ++c) value.v[c] = fma_(weight, part[i].v[c], value.v[c]);
        }
    }
    return FoldedRecord{value, max, sum};
}
