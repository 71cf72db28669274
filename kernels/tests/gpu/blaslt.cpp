// blaslt.cpp - a mock of hipBLASLt for tests on the emulator: checks every argument as strictly as possible,
// then multiplies in memory that host and emulated device share. GEMMs run at once on the host, so they
// cannot be captured. -DFP8_TYPE=28 or 1000: the fp8 format of the emulated architecture.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

namespace {

enum Status { OK = 0, INVALID_VALUE = 3, NOT_SUPPORTED = 6 };
enum Attribute {
    TRANS_A = 0, TRANS_B = 1, EPILOGUE = 2, BIAS_POINTER = 3, BIAS_TYPE = 4, A_SCALES = 5, B_SCALES = 6,
    A_SCALE_MODE = 31, B_SCALE_MODE = 32,
};
// Scale modes; the header lists the others as "not supported yet", or has them for other scale types.
enum { SCALAR_F32 = 0, VECTOR_F32 = 3 };
enum { E4M3 = 28, E4M3_FNUZ = 1000 };
enum { F32 = 0, BF16 = 14, COMPUTE_F32 = 2, OP_N = 111, OP_T = 112, EPILOGUE_NONE = 1, EPILOGUE_BIAS = 4 };

struct Operation {
    int32_t trans_a = OP_N, trans_b = OP_N, epilogue = EPILOGUE_NONE, bias_type = -1;
    const void* bias = nullptr;
    const float *a_scales = nullptr, *b_scales = nullptr;
    int32_t a_scale_mode = SCALAR_F32, b_scale_mode = SCALAR_F32;
};
struct Layout { int type; uint64_t rows, cols; int64_t stride; };
struct Preference { uint64_t workspace = 0; };
// An algorithm that the heuristic returns; it identifies the GEMM size for which it was requested.
struct Algorithm { uint64_t magic, columns, workspace; };
struct Answer { Algorithm algorithm; uint64_t workspace; int32_t status; float waves; int32_t reserved[4]; };
static_assert(sizeof(Algorithm) == 24 && sizeof(Answer) == 56, "as hipBLASLt lays it out");

const uint64_t MAGIC = 0x626c61736c74, BROKEN = MAGIC + 1;
int handle;

float of_fp8(uint8_t bits) {
    const bool fnuz = FP8_TYPE == E4M3_FNUZ;
    const int bias = fnuz ? 8 : 7, exponent = bits >> 3 & 15, digits = bits & 7;
    if (fnuz ? bits == 0x80 : (bits & 0x7f) == 0x7f) return NAN;
    const float size = exponent ? ldexpf((float)(8 + digits), exponent - bias - 3) : ldexpf((float)digits, 1 - bias - 3);
    return bits & 0x80 ? -size : size;
}

float load(const void* p, int type, uint64_t i) {
    if (type == F32) return ((const float*)p)[i];
    if (type == FP8_TYPE) return of_fp8(((const uint8_t*)p)[i]);
    const uint32_t bits = (uint32_t)((const uint16_t*)p)[i] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

void store(void* p, int type, uint64_t i, float x) {
    if (type == F32) { ((float*)p)[i] = x; return; }
    uint32_t bits;
    memcpy(&bits, &x, 4);
    ((uint16_t*)p)[i] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

bool known(const Layout* l) {
    const bool is_type = l && (l->type == F32 || l->type == BF16 || l->type == FP8_TYPE);
    return is_type && l->rows && l->cols && l->stride >= (int64_t)l->rows;
}

// Whether the scales fit the types: f32 vectors for fp8 matrices with sizes that are multiples of 16, otherwise none.
bool scales_fit(const Operation* o, const Layout* a, const Layout* b, const Layout* d) {
    if (a->type != FP8_TYPE) return !o->a_scales && !o->b_scales;
    return o->a_scales && o->b_scales && o->a_scale_mode == VECTOR_F32 && o->b_scale_mode == VECTOR_F32 &&
           d->type != FP8_TYPE && !(a->rows % 16) && !(a->cols % 16) && !(b->cols % 16);
}

// Whether the GEMM is the only supported one: y^T = W x^T, with W transposed.
bool fits(const Operation* o, const Layout* a, const Layout* b, const Layout* c, const Layout* d) {
    return o && known(a) && known(b) && known(d) && c == d && o->trans_a == OP_T && o->trans_b == OP_N &&
           a->type == b->type && (d->type == F32 || d->type == BF16) && (a->type != F32 || d->type == F32) &&
           a->rows == b->rows && a->cols == d->rows && b->cols == d->cols && scales_fit(o, a, b, d);
}

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) int

API hipblasLtCreate(void** out) { *out = &handle; return OK; }
API hipblasLtDestroy(void* h) { return h == &handle ? OK : INVALID_VALUE; }

API hipblasLtMatmulDescCreate(Operation** out, int compute, int scale) {
    if (compute != COMPUTE_F32 || scale != F32) return NOT_SUPPORTED;
    *out = new Operation;
    return OK;
}
API hipblasLtMatmulDescDestroy(Operation* o) { delete o; return OK; }
API hipblasLtMatmulDescSetAttribute(Operation* o, int attribute, const void* value, size_t bytes) {
    const bool is_pointer = attribute == BIAS_POINTER || attribute == A_SCALES || attribute == B_SCALES;
    if (bytes != (is_pointer ? 8 : 4)) return INVALID_VALUE;
    if (attribute == A_SCALE_MODE || attribute == B_SCALE_MODE) {
        int32_t mode;
        memcpy(&mode, value, bytes);
        if (mode != SCALAR_F32 && mode != VECTOR_F32) return NOT_SUPPORTED;
        (attribute == A_SCALE_MODE ? o->a_scale_mode : o->b_scale_mode) = mode;
        return OK;
    }
    switch (attribute) {
        case TRANS_A: memcpy(&o->trans_a, value, bytes); return OK;
        case TRANS_B: memcpy(&o->trans_b, value, bytes); return OK;
        case EPILOGUE: memcpy(&o->epilogue, value, bytes); return OK;
        case BIAS_POINTER: memcpy(&o->bias, value, bytes); return OK;
        case BIAS_TYPE: memcpy(&o->bias_type, value, bytes); return OK;
        case A_SCALES: memcpy(&o->a_scales, value, bytes); return OK;
        case B_SCALES: memcpy(&o->b_scales, value, bytes); return OK;
        default: return INVALID_VALUE;
    }
}

API hipblasLtMatrixLayoutCreate(Layout** out, int type, uint64_t rows, uint64_t cols, int64_t stride) {
    *out = new Layout{type, rows, cols, stride};
    return OK;
}
API hipblasLtMatrixLayoutDestroy(Layout* l) { delete l; return OK; }
API hipblasLtMatrixLayoutSetAttribute(Layout*, int, const void*, size_t) { return NOT_SUPPORTED; }

API hipblasLtMatmulPreferenceCreate(Preference** out) { *out = new Preference; return OK; }
API hipblasLtMatmulPreferenceDestroy(Preference* p) { delete p; return OK; }
API hipblasLtMatmulPreferenceSetAttribute(Preference* p, int attribute, const void* value, size_t bytes) {
    if (attribute != 1 || bytes != 8) return INVALID_VALUE;
    memcpy(&p->workspace, value, bytes);
    return OK;
}

API hipblasLtMatmulAlgoGetHeuristic(void* h, Operation* o, Layout* a, Layout* b, Layout* c, Layout* d, Preference* p,
                                    int wanted, Answer* answers, int* found) {
    if (h != &handle || !fits(o, a, b, c, d) || wanted < 1) return INVALID_VALUE;
    // Buckets of 48 rows are unsupported, so that the caller has to query the exact number of rows; 8 outputs
    // are unsupported for any number of rows.
    if (b->cols == 48 || a->cols == 8) {
        *found = 0;
        return NOT_SUPPORTED;
    }
    // Every second algorithm supports no GEMM, so that a caller that queries several has to try them.
    *found = wanted < 3 ? wanted : 3;
    for (int i = 0; i < *found; ++i)
        answers[i] = Answer{{i % 2 ? BROKEN : MAGIC, b->cols, p->workspace}, p->workspace, OK, 1.f, {}};
    return OK;
}

API hipblasLtMatmul(void* h, Operation* o, const float* alpha, const void* a, Layout* la, const void* b, Layout* lb,
                    const float* beta, const void* c, Layout* lc, void* d, Layout* ld, const Algorithm* algorithm,
                    void* workspace, size_t bytes, void*) {
    if (h != &handle || !fits(o, la, lb, lc, ld) || !(*alpha > 0.f) || *beta != 0.f || c != d) return INVALID_VALUE;
    if (algorithm->magic == BROKEN) return NOT_SUPPORTED;
    if (algorithm->magic != MAGIC || algorithm->workspace > bytes || !workspace) return INVALID_VALUE;
    if (algorithm->columns < lb->cols) return INVALID_VALUE;
    // Odd numbers of rows require an algorithm that was queried for exactly this number, so that a caller
    // that uses buckets has to query again.
    if (lb->cols % 2 && algorithm->columns != lb->cols) return NOT_SUPPORTED;
    const bool with_bias = o->epilogue == EPILOGUE_BIAS;
    if (with_bias && (!o->bias || o->bias_type != ld->type)) return INVALID_VALUE;
    for (uint64_t t = 0; t < ld->cols; ++t)
        for (uint64_t n = 0; n < ld->rows; ++n) {
            float sum = 0.f;
            for (uint64_t k = 0; k < la->rows; ++k)
                sum += load(a, la->type, n * (uint64_t)la->stride + k) * load(b, lb->type, t * (uint64_t)lb->stride + k);
            sum *= *alpha;
            if (o->a_scales) sum *= o->a_scales[n] * o->b_scales[t];
            if (with_bias) sum += load(o->bias, ld->type, n);
            store(d, ld->type, t * (uint64_t)ld->stride + n, sum);
        }
    return OK;
}
