// tk_math.h -- the arithmetic of TKA-1 (docs/tka1.md: S1, S5 to S7, S11 to S13).
//
// Only correctly rounded binary32 fma, mul and add, integer operations and comparisons are used. Every target
// that keeps IEEE-754 gives the same bits for these, so every target gives the same attention.
// No division, no libm and no approximate instruction: those differ between libraries and processors.
//
// One header for host C++, nvcc, NVRTC, clang-HIP and hipRTC; so no standard header at run-time compilation.
#ifndef TK_MATH_H
#define TK_MATH_H

#if defined(__CUDACC_RTC__) || defined(__HIPCC_RTC__)
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif

#if defined(__FAST_MATH__)
#error "TKA-1 promises bits: build without -ffast-math or -Ofast"
#endif

// ---- S1: the three operations and the view of a float as bits, for each kind of compiler

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define TK_FN static __device__ __forceinline__
TK_FN float tk_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
TK_FN float tk_mul(float a, float b) { return __fmul_rn(a, b); }
TK_FN float tk_add(float a, float b) { return __fadd_rn(a, b); }
TK_FN float tk_f32(uint32_t bits) { return __uint_as_float(bits); }
TK_FN uint32_t tk_bits(float x) { return __float_as_uint(x); }

#elif defined(__HIP_DEVICE_COMPILE__) || defined(__HIPCC_RTC__) || defined(__AMDGCN__)
// Built with -ffp-contract=off, so that a * b and a + b stay two operations.
#define TK_FN static __attribute__((device, always_inline)) inline
TK_FN float tk_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
TK_FN float tk_mul(float a, float b) { return a * b; }
TK_FN float tk_add(float a, float b) { return a + b; }
TK_FN float tk_f32(uint32_t bits) { return __builtin_bit_cast(float, bits); }
TK_FN uint32_t tk_bits(float x) { return __builtin_bit_cast(uint32_t, x); }

#else  // host C++ (gcc, clang), built with -ffp-contract=off
#define TK_FN static inline __attribute__((always_inline))
TK_FN float tk_f32(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}
TK_FN uint32_t tk_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}
TK_FN float tk_mul(float a, float b) { return a * b; }
TK_FN float tk_add(float a, float b) { return a + b; }

#if !defined(TK_SOFT_FMA) && !defined(TK_LIBM_FMA) && !defined(__FMA__) && !defined(__ARM_FEATURE_FMA) && \
    !defined(FP_FAST_FMAF)
#define TK_SOFT_FMA  // libm's fmaf without the instruction is 20 times slower; TK_LIBM_FMA takes it, for a test
#endif
#ifdef TK_SOFT_FMA
// An exact fma out of binary64 operations. The product of two binary32 numbers is exact in binary64. Their sum
// with c is rounded to odd: truncated, with the last bit set when something was cut off. From there one rounding
// to binary32 is right, because binary64 has more than two spare bits (S. Boldo, G. Melquiond, "Emulation of
// FMA and correctly rounded sums", 2008). No branch, so that loops over it vectorise.
TK_FN float tk_fma(float a, float b, float c) {
  const double product = (double)a * (double)b, addend = (double)c;
  double sum = product + addend;
  const double back = sum - product;
  const double error = (product - (sum - back)) + (addend - back);  // exact: sum + error = product + addend
  uint64_t bits, error_bits;
  __builtin_memcpy(&bits, &sum, sizeof bits);
  __builtin_memcpy(&error_bits, &error, sizeof error_bits);
  const uint64_t away = (bits ^ error_bits) >> 63;        // 1: the sum was rounded away from zero
  const bool inexact = (error < 0.0) | (error > 0.0);     // false for the NaN error of an infinite sum
  bits = inexact ? (bits - away) | 1u : bits;
  __builtin_memcpy(&sum, &bits, sizeof sum);
  return (float)sum;
}
#else
TK_FN float tk_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#endif
#endif

// ---- constants, as bits, so that no parser can round them differently.
// The derived ones are what tools/derive_coefficients.py prints (kernels/coefficients.txt).

#define TK_LOG2E 0x3FB8AA3Bu      //  0x1.715476p+0    1 / ln 2
#define TK_LN2_HI 0x3F317218u     //  0x1.62e430p-1    ln 2, rounded
#define TK_LN2_LO 0xB102E308u     // -0x1.05c610p-29   ln 2 - TK_LN2_HI
#define TK_SQRT_HALF 0x3F3504F3u  //  0x1.6a09e6p-1    sqrt(1/2)
#define TK_EXP_C2 0x3EFFFFFEu     //  0x1.fffffcp-2
#define TK_EXP_C3 0x3E2AAA49u     //  0x1.555492p-3
#define TK_EXP_C4 0x3D2AAC79u     //  0x1.5558f2p-5
#define TK_EXP_C5 0x3C091CEBu     //  0x1.1239d6p-7
#define TK_EXP_C6 0x3AB51227u     //  0x1.6a244ep-10
#define TK_LOG_C3 0x3EAAAAAAu     //  0x1.555554p-2
#define TK_LOG_C4 0xBE800113u     // -0x1.000226p-2
#define TK_LOG_C5 0x3E4CD004u     //  0x1.99a008p-3
#define TK_LOG_C6 0xBE2A3927u     // -0x1.54724ep-3
#define TK_LOG_C7 0x3E116D0Fu     //  0x1.22da1ep-3
#define TK_LOG_C8 0xBE06C27Du     // -0x1.0d84fap-3
#define TK_LOG_C9 0x3E02AD94u     //  0x1.055b28p-3
#define TK_LOG_C10 0xBD9C5AFEu    // -0x1.38b5fcp-4

#define TK_ROUNDER 0x4B400000u    //  1.5 * 2^23: adding it rounds to an integer
#define TK_RCP_SEED 0x7EF311C7u   //  minus the bits of l: 1 / l to 12 %
#define TK_LIMIT 0x49800000u      //  2^20: logits are clamped here
#define TK_INF 0x7F800000u
#define TK_NEG_INF 0xFF800000u
#define TK_NAN 0x7FC00000u        //  S13: the only NaN that is ever stored (bf16 0x7FC0, binary16 0x7E00)
#define TK_EMPTY (-0x40000000)    //  S6: the M of a partial without any finite key

TK_FN int32_t tk_max(int32_t a, int32_t b) { return a > b ? a : b; }
TK_FN bool tk_is_nan(float x) { return (tk_bits(x) & 0x7FFFFFFFu) > TK_INF; }
TK_FN bool tk_is_finite(float x) { return (tk_bits(x) & 0x7FFFFFFFu) < TK_INF; }
TK_FN float tk_one_nan(float x) { return tk_is_nan(x) ? tk_f32(TK_NAN) : x; }

// ---- bfloat16 (S11): to nearest even by integers, one NaN

TK_FN float tk_from_bf16(uint16_t x) { return tk_f32((uint32_t)x << 16); }
TK_FN uint16_t tk_to_bf16(float x) {
  const uint32_t bits = tk_bits(x);
  return tk_is_nan(x) ? (uint16_t)(TK_NAN >> 16) : (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// ---- binary16, likewise; its subnormals too

TK_FN float tk_from_f16(uint16_t x) {
  const uint32_t sign = (uint32_t)(x & 0x8000u) << 16, exponent = (x >> 10) & 31u, fraction = x & 0x3FFu;
  const uint32_t small = tk_bits(tk_mul((float)(int32_t)fraction, tk_f32(0x33800000u)));  // times 2^-24, exact
  const uint32_t normal = ((exponent == 31u ? 255u : exponent + 112u) << 23) | (fraction << 13);
  return tk_f32(sign | (exponent ? normal : small));
}
TK_FN uint16_t tk_to_f16(float x) {
  const uint32_t bits = tk_bits(x), sign = (bits >> 16) & 0x8000u, u = bits & 0x7FFFFFFFu;
  if (tk_is_nan(x)) return 0x7E00u;
  if (u >= 0x477FF000u) return (uint16_t)(sign | 0x7C00u);  // 65520 and above
  if (u >= 0x38800000u) return (uint16_t)(sign | ((u - 0x38000000u + 0xFFFu + ((u >> 13) & 1u)) >> 13));
  const uint32_t shift = 126u - (u >> 23);  // below 2^-14: an integer number of 2^-24
  if (shift > 25u) return (uint16_t)sign;
  const uint32_t m = (u & 0x7FFFFFu) | 0x800000u;
  return (uint16_t)(sign | ((m + (1u << (shift - 1u)) - 1u + ((m >> shift) & 1u)) >> shift));
}

// ---- exp (S5): e^x = p * 2^n with an integer n, for |x| <= 2^20.
// p stays a number near 1 and n an integer, so nothing overflows and scaling by 2^k stays exact.

TK_FN float tk_clamp(float x) {
  const float limit = tk_f32(TK_LIMIT);
  x = x > limit ? limit : x;
  return x < -limit ? -limit : x;
}
TK_FN float tk_exp(float x, int32_t* n) {
  const float shifted = tk_fma(x, tk_f32(TK_LOG2E), tk_f32(TK_ROUNDER));
  *n = (int32_t)(tk_bits(shifted) - TK_ROUNDER);
  const float whole = tk_add(shifted, -tk_f32(TK_ROUNDER));
  float r = tk_fma(whole, -tk_f32(TK_LN2_HI), x);
  r = tk_fma(whole, -tk_f32(TK_LN2_LO), r);
  float q = tk_f32(TK_EXP_C6);
  q = tk_fma(q, r, tk_f32(TK_EXP_C5));
  q = tk_fma(q, r, tk_f32(TK_EXP_C4));
  q = tk_fma(q, r, tk_f32(TK_EXP_C3));
  q = tk_fma(q, r, tk_f32(TK_EXP_C2));
  q = tk_fma(q, tk_mul(r, r), r);
  return tk_add(q, 1.0f);
}

// ---- scaling by powers of two (S6, S7), for d <= 0: below the normal range both give +0, never a subnormal

TK_FN float tk_pow2(int32_t d) { return d < -126 ? 0.0f : tk_f32((uint32_t)(d + 127) << 23); }
TK_FN float tk_scale(float p, int32_t d) { return d < -125 ? 0.0f : tk_f32(tk_bits(p) + ((uint32_t)d << 23)); }

// S7: one of fa, fb is 1. (-0, +0, TK_EMPTY) is an exact identity on both sides: fma(x, 1, -0 * 0) = x and
// fma(-0, 0, x * 1) = x for every x, both zeros included.
TK_FN float tk_merge(float a, float fa, float b, float fb) { return tk_fma(a, fa, tk_mul(b, fb)); }

// ---- ln(l * 2^M) for a positive normal l (S12)

TK_FN float tk_log(float l, int32_t m) {
  const uint32_t bits = tk_bits(l);
  const int32_t e = (int32_t)(bits - TK_SQRT_HALF) >> 23;  // arithmetic shift: floor
  const float f = tk_add(tk_f32(bits - ((uint32_t)e << 23)), -1.0f);  // 1 + f in [sqrt(1/2), sqrt(2))
  float q = tk_f32(TK_LOG_C10);
  q = tk_fma(q, f, tk_f32(TK_LOG_C9));
  q = tk_fma(q, f, tk_f32(TK_LOG_C8));
  q = tk_fma(q, f, tk_f32(TK_LOG_C7));
  q = tk_fma(q, f, tk_f32(TK_LOG_C6));
  q = tk_fma(q, f, tk_f32(TK_LOG_C5));
  q = tk_fma(q, f, tk_f32(TK_LOG_C4));
  q = tk_fma(q, f, tk_f32(TK_LOG_C3));
  const float ff = tk_mul(f, f);
  const float whole = (float)(m + e);  // exact: far below 2^24
  float r = tk_fma(ff, -0.5f, tk_mul(tk_mul(ff, f), q));
  r = tk_fma(whole, tk_f32(TK_LN2_LO), r);
  r = tk_add(r, f);
  return tk_fma(whole, tk_f32(TK_LN2_HI), r);
}

// ---- 1 / l for a positive normal l (S11): four Newton steps double the correct bits from 3 to all

TK_FN float tk_rcp(float l) {
  float y = tk_f32(TK_RCP_SEED - tk_bits(l));
  y = tk_fma(y, tk_fma(-l, y, 1.0f), y);
  y = tk_fma(y, tk_fma(-l, y, 1.0f), y);
  y = tk_fma(y, tk_fma(-l, y, 1.0f), y);
  return tk_fma(y, tk_fma(-l, y, 1.0f), y);
}

#endif
