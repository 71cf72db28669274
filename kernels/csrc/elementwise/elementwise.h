// elementwise.h - the loop over the columns of elementwise kernels.
#pragma once

// Calls wide(c) for each group of 8 columns, from column c on, that this thread processes; if `aligned` is
// false, calls narrow(c) for each single column instead. A row is divided among `parts` blocks.
template <class Wide, class Narrow> DEV void each_column(u32 cols, u32 parts, bool aligned, Wide wide, Narrow narrow) {
    const u32 first = bid_x() % parts * bdim() + tid(), step = parts * bdim();
    if (aligned && cols % 8 == 0) {
        for (u32 c = first * 8; c < cols; c += step * 8) wide(c);
    } else {
        for (u32 c = first; c < cols; c += step) narrow(c);
    }
}
