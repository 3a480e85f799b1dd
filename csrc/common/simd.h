// Vectors of the instruction set at hand. Included by a kernel body inside namespace dpk::DPK_ISA, hence once per
// instruction set and without an include guard. GCC's vector extensions do the arithmetic; a product and a sum contract
// to one FMA where there is one.

template <typename T>
struct VecOf {
  typedef T type __attribute__((vector_size(DPK_VECTOR_BYTES)));
  static constexpr int64_t kLanes = DPK_VECTOR_BYTES / sizeof(T);
};
template <typename T>
using Vec = typename VecOf<T>::type;
template <typename T>
constexpr int64_t kLanes = VecOf<T>::kLanes;

template <typename T>
static inline Vec<T> load(const T* p) {
  Vec<T> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

template <typename T>
static inline void store(T* p, Vec<T> v) {
  std::memcpy(p, &v, sizeof(v));
}

// A std::vector on whole cache lines: a vector of the instruction set that lies across two costs two accesses.
template <typename T>
struct CacheAligned {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};
  CacheAligned() = default;
  template <typename U>
  CacheAligned(const CacheAligned<U>&) {}
  T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), kLine)); }
  void deallocate(T* p, std::size_t) { ::operator delete(p, kLine); }
  bool operator==(const CacheAligned&) const { return true; }
};
template <typename T>
using Buffer = std::vector<T, CacheAligned<T>>;

// n values on whole cache lines, whatever they hold: small layers are bound by clearing buffers.
template <typename T>
struct FreeLines {
  void operator()(T* p) const { CacheAligned<T>().deallocate(p, 0); }
};
template <typename T>
using Uncleared = std::unique_ptr<T[], FreeLines<T>>;
template <typename T>
static inline Uncleared<T> uncleared(int64_t n) {
  return Uncleared<T>(CacheAligned<T>().allocate(n));
}

// Before a loop over an array of vectors, of a length that is known: so that they live in registers.
#undef DPK_UNROLL
#define DPK_UNROLL _Pragma("GCC unroll 16")

// Where an operation needs intrinsics, they must fit the target that each_isa.h set: clang does not know its pragmas.
#undef DPK_INTRINSICS
#if defined(__x86_64__) && !defined(__clang__)
#define DPK_INTRINSICS 1
#else
#define DPK_INTRINSICS 0
#endif

template <typename T>
static inline Vec<T> vector_sqrt(Vec<T> x) {
#if !DPK_INTRINSICS
  for (int64_t l = 0; l < kLanes<T>; ++l) x[l] = std::sqrt(x[l]);
  return x;
#elif DPK_VECTOR_BYTES == 64  // the unmasked forms warn under GCC 12
  if constexpr (std::is_same_v<T, float>)
    return _mm512_maskz_sqrt_ps(0xffff, x);
  else
    return _mm512_maskz_sqrt_pd(0xff, x);
#elif DPK_VECTOR_BYTES == 32
  if constexpr (std::is_same_v<T, float>)
    return _mm256_sqrt_ps(x);
  else
    return _mm256_sqrt_pd(x);
#else
  if constexpr (std::is_same_v<T, float>)
    return _mm_sqrt_ps(x);
  else
    return _mm_sqrt_pd(x);
#endif
}

// Sum of the lanes in double.
template <typename T>
static inline double lane_sum(Vec<T> v) {
  double s = 0;
  for (int64_t l = 0; l < kLanes<T>; ++l) s += static_cast<double>(v[l]);
  return s;
}

// One vector of doubles from as many values of T. Element by element: GCC makes one conversion of it, and several of
// __builtin_convertvector.
template <typename T, std::size_t... kLane>
static inline Vec<double> load_double(const T* p, std::index_sequence<kLane...>) {
  return Vec<double>{static_cast<double>(p[kLane])...};
}
template <typename T>
static inline Vec<double> load_double(const T* p) {
  return load_double(p, std::make_index_sequence<kLanes<double>>());
}

// Sum of squares of n values, accumulated in double: float values from 1e-38 to 1e38 neither overflow nor vanish.
template <typename T>
static inline double sum_of_squares(const T* p, int64_t n) {
  constexpr int64_t kUnroll = 4;
  Vec<double> partial[kUnroll] = {};
  const int64_t whole = n - n % (kUnroll * kLanes<double>);
  for (int64_t i = 0; i < whole; i += kUnroll * kLanes<double>)
    for (int64_t u = 0; u < kUnroll; ++u) {
      const Vec<double> x = load_double(p + i + u * kLanes<double>);
      partial[u] += x * x;
    }
  double s = lane_sum<double>((partial[0] + partial[1]) + (partial[2] + partial[3]));
  for (int64_t i = whole; i < n; ++i) s += static_cast<double>(p[i]) * static_cast<double>(p[i]);
  return s;
}
