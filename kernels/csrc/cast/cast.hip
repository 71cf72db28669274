// cast: y [rows, cols] = x [rows, cols] in another type, rounded to nearest even. It prepares operands of
// BLAS libraries, which require the bias in the type of y, and x in the type of W. No CPU reference.
//
//   -DFROM_F32=1  x is float      -DTO_F32=1  y is float
// Block: 256. Grid: (rows, ceil(cols / 1024)).
//
// Roofline: bytes of x and y over memory bandwidth.
#include "dev.h"

#if FROM_F32
typedef float FROM;
#else
typedef half_t FROM;
#endif
#if TO_F32
typedef float TO;
#else
typedef half_t TO;
#endif

enum : u32 { COLUMNS = 1024 };

KERNEL(256) cast_rows(TO* y, const FROM* x, u32 cols, u32 y_stride, u32 x_stride) {
    TO* out = y + (u64)bid_x() * y_stride;
    const FROM* in = x + (u64)bid_x() * x_stride;
    const u32 from = bid_y() * COLUMNS, end = from + COLUMNS < cols ? from + COLUMNS : cols;
    grid_wait();
    for (u32 i = from + tid(); i < end; i += bdim()) out[i] = to<TO>(f32(in[i]));
}
EXPORT(cast_rows)
