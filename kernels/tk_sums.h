// tk_sums.h -- the register tile: R rows of N vectors of sums, and the two things that happen to them.
//
// chain (S4, S6.3): x[i] = fma(factor[i][y], row[y], x[i]), y ascending. Scores: i = key, y = d, lanes = query lines.
// Values: i = query line, y = key, lanes = output columns.
// merge (S7): with a node of the tree that waits in memory, while these sums are still in registers.
#ifndef TK_SUMS_H
#define TK_SUMS_H
#include <type_traits>

#include "tk_lanes.h"

namespace tka1 {

// A matrix by its start and its strides, in elements; an element of a row is one step from the next.
struct Matrix {
  float* data;
  ptrdiff_t stride;
  float* at(int row, int x = 0) const { return data + row * stride + x; }
};
// factor[i][y] = data[i * row + y * step]
struct Factors {
  const float* data;
  ptrdiff_t row, step;
};

template <int R, int N>
class Sums {
 public:
  void fill(float value) {
    each([&](int i, int n) { x[i][n] = broadcast(value); });
  }
  void fill_where(const int32_t* key, int32_t wanted, float value) {  // rows i with key[i] == wanted
    TK_UNROLL
    for (int i = 0; i < R; ++i)
      if (key[i] == wanted)
        TK_UNROLL
        for (int n = 0; n < N; ++n) x[i][n] = broadcast(value);
  }
  void load_from(Matrix m) {
    each([&](int i, int n) { x[i][n] = load<Lanes>(m.at(i, n * kLanes)); });
  }
  void store_to(Matrix m) {
    each([&](int i, int n) { store(m.at(i, n * kLanes), x[i][n]); });
  }
  // rows(y, n): vector n of row y
  template <class Rows>
  TK_INLINE void chain(Factors f, Rows rows, int from, int to) {
    for (int y = from; y < to; ++y) {
      Lanes value[N];
      TK_UNROLL
      for (int n = 0; n < N; ++n) value[n] = rows(y, n);
      each([&](int i, int n) { x[i][n] = fma_lanes(broadcast(f.data[i * f.row + y * f.step]), value[n], x[i][n]); });
    }
  }
  // The same for each row i over its own [from[i], to[i]) outside of [low, high): where some rows see a key and
  // others do not. A key that a row does not see must not even add 0 * v.
  template <class Rows>
  TK_INLINE void chain_edges(Factors f, Rows rows, const int32_t* from, const int32_t* to, int low, int high) {
    TK_UNROLL
    for (int i = 0; i < R; ++i)
      for (int y = std::max(low, from[i]); y < std::min(high, to[i]); ++y) {
        const Lanes factor = broadcast(f.data[i * f.row + y * f.step]);
        TK_UNROLL
        for (int n = 0; n < N; ++n) x[i][n] = fma_lanes(factor, rows(y, n), x[i][n]);
      }
  }
  // waiting: the node with the lower ids. a[i], b[i]: the factors of S7 for row i.
  TK_INLINE void merge(Matrix waiting, const float* a, const float* b) {
    each([&](int i, int n) {
      x[i][n] = fma_lanes(load<Lanes>(waiting.at(i, n * kLanes)), broadcast(a[i]), x[i][n] * broadcast(b[i]));
    });
  }

 private:
  Lanes x[R][N];

  template <class Body>
  TK_INLINE void each(Body body) {
    TK_UNROLL
    for (int i = 0; i < R; ++i)
      TK_UNROLL
      for (int n = 0; n < N; ++n) body(i, n);
  }
};

// Calls body<R>(first) for blocks of R rows until `rows` are done: as many as fit a tile, then what is left.
template <int R, class Body>
TK_INLINE void rest_of_rows(int first, int left, Body& body) {
  if constexpr (R > 0) {
    if (left == R)
      body(std::integral_constant<int, R>(), first);
    else
      rest_of_rows<R - 1>(first, left, body);
  }
}
template <int R, class Body>
static inline void by_rows(int rows, Body body) {
  int i = 0;
  for (; i + R <= rows; i += R) body(std::integral_constant<int, R>(), i);
  rest_of_rows<R - 1>(i, rows - i, body);
}

}  // namespace tka1
#endif
