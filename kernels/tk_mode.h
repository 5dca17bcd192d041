// tk_mode.h -- the floating-point mode of a thread (docs/tka1.md, S1).
#ifndef TK_MODE_H
#define TK_MODE_H
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tka1 {

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

}  // namespace tka1
#endif
