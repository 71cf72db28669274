// latent_groups/put.h - how a warpgroup leaves its half of the channels: as means, or in records (latent_decode/records.h).
#pragma once

enum : u32 { SUMS = HALF / 2 };  // of a lane: two heads, a quarter of the channels each

DEV u32 first_channel() { return wave() / 4 * HALF; }

// `scale`: of the lane's two heads.
DEV void put_means(const float (&o)[SUMS], const Place& p, const Outputs& to, const float (&scale)[2]) {
    UNROLL for (u32 i = 0; i < SUMS; i += 2) {
        const u32 head = wgmma_row(i), slot = i >> 1 & 1;
        if (first_head() + head < to.heads)
            *(u32*)(mean_of(p, to, head) + first_channel() + wgmma_col(i)) = pack_half(o[i] * scale[slot], o[i + 1] * scale[slot]);
    }
}

// Means of no keys. Queries, whose place they take, have been read when the first warpgroup comes.
DEV void put_nothing(const Place& p, const Outputs& to) {
    team_sync();
    for (u32 head = wave(); head < kept_heads(to) && first_head() + head < to.heads; head += WAVES)
        for (u32 channel = lane() * 8; channel < LATENT; channel += WAVE * 8) 
            *(u32x4*)(mean_of(p, to, head) + channel) = u32x4{{0, 0, 0, 0}};
}

DEV void put_record(const float (&o)[SUMS], const Place& p, const Outputs& to) {
    float* records = records_of(p, to, p.split) + first_channel();
    UNROLL for (u32 i = 0; i < SUMS; i += 2)
        if (wgmma_row(i) < kept_heads(to)) *(f32x2*)(records + wgmma_row(i) * RECORD + wgmma_col(i)) = f32x2{{o[i], o[i + 1]}};
}

// What the lane's two heads know of all keys of the split; maxima in units of log2(e).
DEV void put_facts(const float (&max)[2], const float (&sum)[2], const Place& p, const Outputs& to) {
    if (lane() % 4 != 0) return;
    float* records = records_of(p, to, p.split) + LATENT;
    UNROLL for (u32 slot = 0; slot < 2; ++slot)
        if (wgmma_row(slot * 2) < kept_heads(to)) *(f32x2*)(records + wgmma_row(slot * 2) * RECORD) = f32x2{{max[slot], sum[slot]}};
}
