// tk_host.cpp -- the C entries of TKA-1 on a CPU. Built once an instruction set; every build has the same names.
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include "tk_body.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define TK_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// S1: round to nearest, subnormals kept, exceptions masked, for the life of the object; then the caller's mode again.
class Ieee {
 public:
#if defined(__x86_64__)
  Ieee() : before_(_mm_getcsr()) { _mm_setcsr(0x1F80u); }
  ~Ieee() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  Ieee() { __asm__ volatile("mrs %0, fpcr\n\tmsr fpcr, %1\n\tisb" : "=&r"(before_) : "r"((uint64_t)0) : "memory"); }
  ~Ieee() { __asm__ volatile("msr fpcr, %0\n\tisb" ::"r"(before_) : "memory"); }

 private:
  uint64_t before_;
#endif
};

// Cuts a launch into tiles. Rows with ranges share a leaf's conversion; a row with a list stands alone.
std::vector<tka1::Tile> cut(const tk_args& a, int threads) {
  bool lists = false;
  for (int f = 0; f < a.families; ++f) lists |= a.family[f].ids != nullptr;
  const int group = a.H / a.Hkv;
  int heads = std::min(group, tka1::kLineLimit);
  int rows = lists ? 1 : tka1::kLineLimit / heads;
  const auto pieces = [&] { return (int64_t)(a.T + rows - 1) / rows * a.Hkv * ((group + heads - 1) / heads); };
  while (pieces() < threads && rows > 1) rows = (rows + 1) / 2;
  while (pieces() < threads && heads > 4) heads = (heads + 1) / 2;

  std::vector<tka1::Tile> tiles;
  for (int t = 0, next; t < a.T; t = next) {
    for (next = t + 1; next < a.T && next < t + rows && a.request[next] == a.request[t];) ++next;
    for (int g = 0; g < a.Hkv; ++g)
      for (int h = 0; h < group; h += heads)
        tiles.push_back({t, next - t, g * group + h, std::min(heads, group - h)});
  }
  return tiles;
}

}  // namespace

// The size of the arguments: a library of another build is refused instead of misread.
TK_EXPORT int64_t tka1_args_size() { return sizeof(tk_args); }

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
// an exception must not leave a thread or cross the C border.
TK_EXPORT int tka1_run(const tk_args* args, int threads) try {
  const std::vector<tka1::Tile> tiles = cut(*args, threads);
  std::atomic<size_t> left(tiles.size());  // from the end: in a causal launch the last tiles are the longest
  std::atomic<bool> failed(false);
  const auto work = [&] {
    try {
      const Ieee mode;
      tka1::Worker worker(*args);
      for (size_t n; (n = left.load()) > 0;)
        if (left.compare_exchange_weak(n, n - 1)) worker.run(tiles[n - 1]);
    } catch (const std::exception&) {
      failed = true;
    }
  };
  const int wanted = std::min(threads, (int)tiles.size());
  std::vector<std::thread> others;
  others.reserve(std::max(wanted, 1));  // nothing may throw between a thread that runs and its join
  try {
    for (int i = 1; i < wanted; ++i) others.emplace_back(work);
  } catch (const std::exception&) {  // no more threads, or no memory for one: fewer do the same work
  }
  work();
  for (std::thread& thread : others) thread.join();
  return failed;
} catch (const std::exception&) {
  return 1;
}

// ---- the arithmetic alone, for tests

TK_EXPORT void tka1_fma(const float* a, const float* b, const float* c, float* out, int64_t count) {
  const Ieee mode;
  for (int64_t i = 0; i < count; ++i) out[i] = tk_fma(a[i], b[i], c[i]);
}
TK_EXPORT void tka1_exp(const float* x, float* p, int32_t* n, int64_t count) {
  const Ieee mode;
  for (int64_t i = 0; i < count; ++i) p[i] = tk_exp(tk_clamp(x[i]), &n[i]);
}
TK_EXPORT void tka1_log(const float* l, const int32_t* m, float* out, int64_t count) {
  const Ieee mode;
  for (int64_t i = 0; i < count; ++i) out[i] = tk_log(l[i], m[i]);
}
TK_EXPORT void tka1_rcp(const float* l, float* out, int64_t count) {
  const Ieee mode;
  for (int64_t i = 0; i < count; ++i) out[i] = tk_rcp(l[i]);
}
TK_EXPORT void tka1_bf16(const float* x, uint16_t* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = tk_to_bf16(x[i]);
}
