// What vectors and the device share of a fast normal (definition: common/exact_normal.h): polynomials, constants, the
// bound on the error. Included inside a namespace, hence without an include guard, after
//
//   D multiply_add(D a, D b, D c)    a b + c, in one rounding or two
//
// for D = double or a vector of doubles.
//
// u and t are taken to 53 and 52 bits and everything is computed in double. For radii within (kLowestRadius2,
// kHighestRadius2), all but 4e-5 of the pairs, the error is below kFastError:
//   log       near u = 1, where u is off by 2^-54, r is off by 2^-54 / r <= 2^-47; near u = 2^-18, where n is off by
//             2^-46 of itself, by 2^-46 / r <= 2^-48; polynomial and arithmetic are off by 2^-51 of r
//   sin, cos  t, cut to 52 bits, moves them by pi / 2 2^-52; polynomial and arithmetic by 2^-52
// where r <= 5 multiplies the last two. The other pairs are computed exactly. Products and sums may be fused or not:
// sums, products, quotients and square roots, each correctly rounded, are all that is used.

constexpr double kLowestRadius2 = 0x1p-14, kHighestRadius2 = 24.9;
constexpr double kFastError = 0x1p-46;

// log(m) = 2 s (1 + z P(z)) for s = (m - 1) / (m + 1), z = s^2, sqrt(1/2) <= m < sqrt(2); P fitted to 2^-57.
template <typename D>
DPK_HOST_DEVICE static inline D log_series(D z) {
  const D zero{}, z2 = z * z;
  const D p01 = multiply_add(z, zero + 0x1.99999999952e2p-3, zero + 0x1.5555555555558p-2);
  const D p23 = multiply_add(z, zero + 0x1.c71c62e5800a1p-4, zero + 0x1.2492492df148dp-3);
  const D p45 = multiply_add(z, zero + 0x1.39fe606542ddep-4, zero + 0x1.7462b4ab2ef6bp-4);
  const D p6 = multiply_add(z2, zero + 0x1.2b584aae78a57p-4, p45);
  return multiply_add(z2 * z2, p6, multiply_add(z2, p23, p01));
}

// sin(t pi / 2) / t and cos(t pi / 2) for z = t^2 <= 1/4.
template <typename D>
DPK_HOST_DEVICE static inline D sine_series(D z) {
  const D zero{};
  D sine = zero + 0x1.e3f38399551bfp-25;
  sine = multiply_add(sine, z, zero - 0x1.e30071afc3e59p-19);
  sine = multiply_add(sine, z, zero + 0x1.50782fda12d96p-13);
  sine = multiply_add(sine, z, zero - 0x1.32d2cce2e5b19p-8);
  sine = multiply_add(sine, z, zero + 0x1.466bc677587f8p-4);
  sine = multiply_add(sine, z, zero - 0x1.4abbce625be41p-1);
  return multiply_add(sine, z, zero + 0x1.921fb54442d18p+0);
}

template <typename D>
DPK_HOST_DEVICE static inline D cosine_series(D z) {
  const D zero{};
  D cosine = zero - 0x1.b2f3eb054afcdp-28;
  cosine = multiply_add(cosine, z, zero + 0x1.f9ce245cada0bp-22);
  cosine = multiply_add(cosine, z, zero - 0x1.a6d1eef479be1p-16);
  cosine = multiply_add(cosine, z, zero + 0x1.e1f5068688d5bp-11);
  cosine = multiply_add(cosine, z, zero - 0x1.55d3c7e3cb241p-6);
  cosine = multiply_add(cosine, z, zero + 0x1.03c1f081b5ac0p-2);
  cosine = multiply_add(cosine, z, zero - 0x1.3bd3cc9be45dep+0);
  return multiply_add(cosine, z, zero + 1.0);
}
