// Runs one launch from stdin to stdout, for processors that this Python does not run on (test_other_compilers.py).
// Everything is little-endian; the header is int64: T H Hkv D DV families requests has_sink scale type.
// The argument is the number of threads, 2 without one. With `where` it prints where in its library the fmaf lies that
// this process uses, and runs nothing.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>

#include "tk_host.cpp"

template <class T>
static std::vector<T> take(int64_t count) {
  std::vector<T> values(count + 1);  // one more, so that the address of an empty list is not null
  if (std::fread(values.data(), sizeof(T), count, stdin) != (size_t)count) std::abort();
  return values;
}
template <class T>
static void give(const std::vector<T>& values) {
  std::fwrite(values.data(), sizeof(T), values.size(), stdout);
}

static int print_fmaf() {
  float (*volatile used)(float, float, float) = std::fmaf;
  Dl_info where;
  if (!dladdr((void*)used, &where)) return 1;
  std::printf("%s %td\n", where.dli_fname, (char*)used - (char*)where.dli_fbase);
  return 0;
}

int main(int argc, char** argv) {
  if (argc > 1 && !std::strcmp(argv[1], "where")) return print_fmaf();
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  const std::vector<int64_t> h = take<int64_t>(10);
  const int64_t T = h[0], H = h[1], Hkv = h[2], D = h[3], DV = h[4], families = h[5], requests = h[6];
  const int64_t halves = tk_size((int32_t)h[9]) / 2;  // of an element of q, k, v and out
  const auto q = take<uint16_t>(T * H * D * halves);
  const auto request = take<int32_t>(T);
  const auto sink = take<uint32_t>(h[7] ? H : 0);
  std::vector<uint16_t> out(T * H * DV * halves);
  std::vector<uint32_t> lse(T * H), lse_sink(T * H), acc(T * H * DV), l(T * H);
  std::vector<int32_t> m(T * H);

  std::vector<std::vector<uint16_t>> rows;
  std::vector<std::vector<int64_t>> selections;
  std::vector<tk_rows> tables[TK_FAMILIES];
  tk_args args = {};
  for (int f = 0; f < families; ++f) {
    for (int r = 0; r < requests; ++r) {
      const auto place = take<int64_t>(2);  // count, first
      rows.push_back(take<uint16_t>(place[0] * Hkv * D * halves));
      const uint16_t* k = rows.back().data();
      rows.push_back(take<uint16_t>(place[0] * Hkv * DV * halves));
      tables[f].push_back({k, rows.back().data(), place[1]});
    }
    tk_family& family = args.family[f];
    family.requests = tables[f].data();
    const int64_t ids = take<int64_t>(1)[0];  // -1: a range
    for (const int64_t count : {ids < 0 ? T : ids, ids < 0 ? T : T + 1}) selections.push_back(take<int64_t>(count));
    const int64_t *a = selections[selections.size() - 2].data(), *b = selections.back().data();
    (ids < 0 ? family.lo : family.ids) = a;
    (ids < 0 ? family.hi : family.offsets) = b;
  }
  args.q = q.data(), args.request = request.data(), args.sink = h[7] ? sink.data() : nullptr;
  args.out = out.data(), args.lse = lse.data(), args.lse_sink = lse_sink.data();
  args.acc = acc.data(), args.l = l.data(), args.m = m.data();
  args.families = (int32_t)families, args.T = (int32_t)T, args.H = (int32_t)H, args.Hkv = (int32_t)Hkv;
  args.D = (int32_t)D, args.DV = (int32_t)DV, args.scale = (uint32_t)h[8];
  args.type = (int32_t)h[9];
  if (tka1_run(&args, threads)) return 1;
  give(out), give(lse), give(lse_sink), give(acc), give(l), give(m);
  return 0;
}
