// tk_host.cpp -- the C entries of TKA-1 on a CPU. Built once an instruction set; every build has the same names.
#include "tk_backward.h"

#define TK_EXPORT extern "C" __attribute__((visibility("default")))

// The size of the arguments: a library of another build is refused instead of misread.
TK_EXPORT int64_t tka1_args_size() { return sizeof(tk_args); }
TK_EXPORT int64_t tka1_grad_args_size() { return sizeof(tk_grad_args); }

// The best build for this processor: 1, 3 or 4. Asks the operating system too (__builtin_cpu_supports does).
TK_EXPORT int tka1_best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("fma") || !__builtin_cpu_supports("avx2")) return 1;
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  return v4 ? 4 : 3;
#else
  return 1;
#endif
}

// Runs a launch whose arguments the caller has checked (tracekit/providers/tka1/inputs.py). 0, or 1 without memory:
// an exception must not cross the C border.
TK_EXPORT int tka1_run(const tk_args* args, int threads) try {
  return !tka1::launch(*args, threads, {}, nullptr);
} catch (const std::exception&) {
  return 1;
}

// The same in a schedule (tk_schedule.h), with an account of what ran.
TK_EXPORT int tka1_run_as(const tk_args* args, int threads, const tk_schedule* schedule, tk_ran* ran) try {
  return !tka1::launch(*args, threads, *schedule, ran);
} catch (const std::exception&) {
  return 1;
}

// The same by the clear form (tk_clear.h): slow, to be compared with.
TK_EXPORT int tka1_clear(const tk_args* args, int) try {
  return !tka1::launch_clear(*args);
} catch (const std::exception&) {
  return 1;
}

// The gradients of a launch whose rows before S10 are in acc, l and m (S16). Likewise.
TK_EXPORT int tka1_backward(const tk_grad_args* args, int threads) try {
  return !tka1::launch_backward(*args, threads);
} catch (const std::exception&) {
  return 1;
}

// ---- the arithmetic alone, for tests

TK_EXPORT void tka1_fma(const float* a, const float* b, const float* c, float* out, int64_t count) {
  const tka1::Ieee mode;
  for (int64_t i = 0; i < count; ++i) out[i] = tk_fma(a[i], b[i], c[i]);
}
TK_EXPORT void tka1_exp(const float* x, float* p, int32_t* n, int64_t count) {
  const tka1::Ieee mode;
  for (int64_t i = 0; i < count; ++i) p[i] = tk_exp(tk_clamp(x[i]), &n[i]);
}
TK_EXPORT void tka1_log(const float* l, const int32_t* m, float* out, int64_t count) {
  const tka1::Ieee mode;
  for (int64_t i = 0; i < count; ++i) out[i] = tk_log(l[i], m[i]);
}
TK_EXPORT void tka1_rcp(const float* l, float* out, int64_t count) {
  const tka1::Ieee mode;
  for (int64_t i = 0; i < count; ++i) out[i] = tk_rcp(l[i]);
}
TK_EXPORT void tka1_from_f16(const uint16_t* x, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = tk_from_f16(x[i]);
}
TK_EXPORT void tka1_f16(const float* x, uint16_t* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = tk_to_f16(x[i]);
}
TK_EXPORT void tka1_bf16(const float* x, uint16_t* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = tk_to_bf16(x[i]);
}
