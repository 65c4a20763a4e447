/* Reductions: target[i] = base[i] op incoming[i], one rounding per element and addition, so that the result depends on
 * the order of the members only. target may be base; incoming never overlaps them. No pointer need be aligned. */
#include "plane.h"
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && !defined(KS_NO_CLONES)
#define FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAST
#endif

#define UNALIGNED(type, name) typedef type name __attribute__((aligned(1), may_alias))
UNALIGNED(uint8_t, u8); UNALIGNED(int8_t, i8); UNALIGNED(int16_t, i16); UNALIGNED(int32_t, i32); UNALIGNED(int64_t, i64);
UNALIGNED(uint16_t, u16); UNALIGNED(uint32_t, u32); UNALIGNED(uint64_t, u64);
UNALIGNED(float, f32); UNALIGNED(double, f64);
UNALIGNED(_Float16, f16);

#define LOOP(name, type, expression)                                                                                   \
    FAST static void name(void *target, const void *base, const void *incoming, size_t count) {                        \
        type *t = target; const type *a = base, *b = incoming;                                                         \
        _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) t[i] = (type)(expression);                             \
    }

/* Integer sums and products wrap: computed without a sign. */
#define INTEGER(type, wide)                                                                                            \
    LOOP(type##_sum, type, (wide)a[i] + (wide)b[i]) LOOP(type##_product, type, (wide)a[i] * (wide)b[i])                \
    LOOP(type##_min, type, a[i] < b[i] ? a[i] : b[i]) LOOP(type##_max, type, a[i] > b[i] ? a[i] : b[i])                \
    LOOP(type##_band, type, a[i] & b[i]) LOOP(type##_bor, type, a[i] | b[i]) LOOP(type##_bxor, type, a[i] ^ b[i])
INTEGER(u8, uint32_t) INTEGER(i8, uint32_t) INTEGER(i16, uint32_t) INTEGER(u16, uint32_t)
INTEGER(i32, uint32_t) INTEGER(u32, uint32_t) INTEGER(i64, uint64_t) INTEGER(u64, uint64_t)

LOOP(bool_or, u8, (a[i] | b[i]) != 0) LOOP(bool_and, u8, (a[i] != 0) & (b[i] != 0)) LOOP(bool_xor, u8, (a[i] != 0) ^ (b[i] != 0))

/* A NaN on either side gives a NaN, as in torch. */
#define FLOATING(type)                                                                                                 \
    LOOP(type##_sum, type, a[i] + b[i]) LOOP(type##_product, type, a[i] * b[i])                                        \
    LOOP(type##_min, type, (a[i] < b[i] || a[i] != a[i]) ? a[i] : b[i])                                                \
    LOOP(type##_max, type, (a[i] > b[i] || a[i] != a[i]) ? a[i] : b[i])
FLOATING(f32) FLOATING(f64)

LOOP(f16_sum, f16, (float)a[i] + (float)b[i]) LOOP(f16_product, f16, (float)a[i] * (float)b[i])
LOOP(f16_min, f16, ((float)a[i] < (float)b[i] || (float)a[i] != (float)a[i]) ? a[i] : b[i])
LOOP(f16_max, f16, ((float)a[i] > (float)b[i] || (float)a[i] != (float)a[i]) ? a[i] : b[i])

static inline float bf16_wide(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

/* Round to nearest even; NaN becomes 0x7fc0 as in torch's c10::BFloat16. */
static inline uint16_t bf16_narrow(float wide) {
    uint32_t bits;
    memcpy(&bits, &wide, 4);
    uint32_t rounded = (bits + (((bits >> 16) & 1) + 0x7fffu)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}
LOOP(bf16_sum, u16, bf16_narrow(bf16_wide(a[i]) + bf16_wide(b[i])))
LOOP(bf16_product, u16, bf16_narrow(bf16_wide(a[i]) * bf16_wide(b[i])))
LOOP(bf16_min, u16, (bf16_wide(a[i]) < bf16_wide(b[i]) || bf16_wide(a[i]) != bf16_wide(a[i])) ? a[i] : b[i])
LOOP(bf16_max, u16, (bf16_wide(a[i]) > bf16_wide(b[i]) || bf16_wide(a[i]) != bf16_wide(a[i])) ? a[i] : b[i])

#define COMPLEX(name, part)                                                                                            \
    static void name##_sum(void *t, const void *a, const void *b, size_t count) { part##_sum(t, a, b, 2 * count); }    \
    FAST static void name##_product(void *target, const void *base, const void *incoming, size_t count) {              \
        part *t = target; const part *a = base, *b = incoming;                                                         \
        _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) {                                                      \
            part x = a[2 * i], y = a[2 * i + 1], u = b[2 * i], v = b[2 * i + 1];                                       \
            t[2 * i] = x * u - y * v;                                                                                  \
            t[2 * i + 1] = x * v + y * u;                                                                              \
        }                                                                                                              \
    }
COMPLEX(c64, f32) COMPLEX(c128, f64)

#define SCALE(name, type, expression)                                                                                  \
    FAST static void name(void *target, size_t count, int divisor) {                                                   \
        type *t = target; float by = (float)divisor; (void)by;                                                         \
        for (size_t i = 0; i < count; i++) t[i] = (type)(expression);                                                  \
    }
SCALE(f32_scale, f32, t[i] / by) SCALE(f64_scale, f64, t[i] / (double)divisor) SCALE(f16_scale, f16, (float)t[i] / by)
SCALE(bf16_scale, u16, bf16_narrow(bf16_wide(t[i]) / by))
static void c64_scale(void *t, size_t count, int divisor) { f32_scale(t, 2 * count, divisor); }
static void c128_scale(void *t, size_t count, int divisor) { f64_scale(t, 2 * count, divisor); }

#define INTEGER_ROW(type) {type##_sum, type##_product, type##_min, type##_max, type##_band, type##_bor, type##_bxor, 0}
#define FLOAT_ROW(type) {type##_sum, type##_product, type##_min, type##_max, 0, 0, 0, type##_sum}
static const kernel kernels[KS_ELEMENTS][8] = {
    [KS_UINT8] = INTEGER_ROW(u8), [KS_INT8] = INTEGER_ROW(i8), [KS_INT16] = INTEGER_ROW(i16), [KS_INT32] = INTEGER_ROW(i32),
    [KS_INT64] = INTEGER_ROW(i64), [KS_UINT16] = INTEGER_ROW(u16), [KS_UINT32] = INTEGER_ROW(u32), [KS_UINT64] = INTEGER_ROW(u64),
    [KS_FLOAT16] = FLOAT_ROW(f16), [KS_BFLOAT16] = FLOAT_ROW(bf16), [KS_FLOAT32] = FLOAT_ROW(f32), [KS_FLOAT64] = FLOAT_ROW(f64),
    [KS_BOOL] = {bool_or, bool_and, bool_and, bool_or, bool_and, bool_or, bool_xor, 0},
    [KS_COMPLEX64] = {c64_sum, c64_product, 0, 0, 0, 0, 0, c64_sum},
    [KS_COMPLEX128] = {c128_sum, c128_product, 0, 0, 0, 0, 0, c128_sum},
};
static const scaler scalers[KS_ELEMENTS] = {
    [KS_FLOAT16] = f16_scale, [KS_BFLOAT16] = bf16_scale, [KS_FLOAT32] = f32_scale, [KS_FLOAT64] = f64_scale,
    [KS_COMPLEX64] = c64_scale, [KS_COMPLEX128] = c128_scale,
};

kernel kernel_for(int element, int reduction) {
    if (element < 0 || element >= KS_ELEMENTS || reduction < 0 || reduction > KS_AVG) return NULL;
    return kernels[element][reduction];
}

scaler scaler_for(int element) { return scalers[element]; }

size_t element_bytes(int element) {
    static const uint8_t bytes[KS_ELEMENTS] = {1, 1, 2, 4, 8, 2, 4, 8, 2, 2, 4, 8, 1, 8, 16};
    return element < 0 || element >= KS_ELEMENTS ? 0 : bytes[element];
}
