// A matrix turned around, for packing operands. Included by a kernel body inside namespace dpk::DPK_ISA.

#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
#define DPK_SHUFFLE4(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define DPK_SHUFFLE4(a, b, i, j, k, l) __builtin_shuffle(a, b, Index4{i, j, k, l})
#endif

// to[c, r] = from[r, c] for `columns` columns, with row strides of their own; rows beyond `rows` come out zero.
template <typename T, typename A>
inline void transpose(const T* from, int64_t rows, int64_t columns, int64_t from_stride, A* to, int64_t to_stride) {
  int64_t r = 0;
  if constexpr (std::is_same_v<T, float> && std::is_same_v<A, float>) {
    typedef float Vec4 __attribute__((vector_size(16)));
    [[maybe_unused]] typedef int Index4 __attribute__((vector_size(16)));
    for (; r + 4 <= rows; r += 4) {
      const float* f = from + r * from_stride;
      int64_t c = 0;
      for (; c + 4 <= columns; c += 4) {
        Vec4 v[4];
        for (int64_t i = 0; i < 4; ++i) std::memcpy(&v[i], f + i * from_stride + c, sizeof(Vec4));
        const Vec4 a = DPK_SHUFFLE4(v[0], v[1], 0, 4, 1, 5), b = DPK_SHUFFLE4(v[2], v[3], 0, 4, 1, 5);
        const Vec4 p = DPK_SHUFFLE4(v[0], v[1], 2, 6, 3, 7), q = DPK_SHUFFLE4(v[2], v[3], 2, 6, 3, 7);
        v[0] = DPK_SHUFFLE4(a, b, 0, 1, 4, 5);
        v[1] = DPK_SHUFFLE4(a, b, 2, 3, 6, 7);
        v[2] = DPK_SHUFFLE4(p, q, 0, 1, 4, 5);
        v[3] = DPK_SHUFFLE4(p, q, 2, 3, 6, 7);
        for (int64_t i = 0; i < 4; ++i) std::memcpy(to + (c + i) * to_stride + r, &v[i], sizeof(Vec4));
      }
      for (; c < columns; ++c)
        for (int64_t i = 0; i < 4; ++i) to[c * to_stride + r + i] = f[i * from_stride + c];
    }
  }
  for (; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) to[c * to_stride + r] = static_cast<A>(from[r * from_stride + c]);
}

#undef DPK_SHUFFLE4
