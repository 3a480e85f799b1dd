// Discrete Fourier transforms of 2 to 8 numbers in place, on the CPU and on the device. Included where Complex<T> is
// defined, with sums, scaled(factor, a), added(factor, a, b) = factor a + b and quarter<kInverse>(a).

template <bool kInverse, typename T>
DPK_HOST_DEVICE inline void butterfly(Complex<T> (&z)[2]) {
  const Complex<T> a = z[0] + z[1];
  z[1] = z[0] - z[1];
  z[0] = a;
}

template <bool kInverse, typename T>
DPK_HOST_DEVICE inline void butterfly(Complex<T> (&z)[3]) {
  constexpr T kSine = static_cast<T>(0.866025403784438646763723170752936183);
  const Complex<T> sum = z[1] + z[2], middle = added(static_cast<T>(-0.5), sum, z[0]);
  const Complex<T> side = quarter<kInverse>(scaled(kSine, z[1] - z[2]));
  z[0] = z[0] + sum;
  z[1] = middle + side;
  z[2] = middle - side;
}

template <bool kInverse, typename T>
DPK_HOST_DEVICE inline void butterfly(Complex<T> (&z)[4]) {
  const Complex<T> even = z[0] + z[2], even_less = z[0] - z[2];
  const Complex<T> odd = z[1] + z[3], odd_less = quarter<kInverse>(z[1] - z[3]);
  z[0] = even + odd;
  z[1] = even_less + odd_less;
  z[2] = even - odd;
  z[3] = even_less - odd_less;
}

template <bool kInverse, typename T>
DPK_HOST_DEVICE inline void butterfly(Complex<T> (&z)[5]) {
  constexpr T kCos1 = static_cast<T>(0.309016994374947424102293417182819059);
  constexpr T kCos2 = static_cast<T>(-0.809016994374947424102293417182819059);
  constexpr T kSin1 = static_cast<T>(0.951056516295153572116439333379382143);
  constexpr T kSin2 = static_cast<T>(0.587785252292473129168705954639072769);
  const Complex<T> near = z[1] + z[4], far = z[2] + z[3], near_less = z[1] - z[4], far_less = z[2] - z[3];
  const Complex<T> middle1 = added(kCos2, far, added(kCos1, near, z[0]));
  const Complex<T> middle2 = added(kCos1, far, added(kCos2, near, z[0]));
  const Complex<T> side1 = quarter<kInverse>(added(kSin1, near_less, scaled(kSin2, far_less)));
  const Complex<T> side2 = quarter<kInverse>(added(kSin2, near_less, scaled(-kSin1, far_less)));
  z[0] = z[0] + near + far;
  z[1] = middle1 + side1;
  z[2] = middle2 + side2;
  z[3] = middle2 - side2;
  z[4] = middle1 - side1;
}

// 2 and 3 are coprime: with elements and results numbered to fit, no result is turned between the two.
template <bool kInverse, typename T>
DPK_HOST_DEVICE inline void butterfly(Complex<T> (&z)[6]) {
  Complex<T> even[3] = {z[0] + z[3], z[2] + z[5], z[4] + z[1]}, odd[3] = {z[0] - z[3], z[2] - z[5], z[4] - z[1]};
  butterfly<kInverse>(even);
  butterfly<kInverse>(odd);
  z[0] = even[0];
  z[1] = odd[1];
  z[2] = even[2];
  z[3] = odd[0];
  z[4] = even[1];
  z[5] = odd[2];
}

template <bool kInverse, typename T>
DPK_HOST_DEVICE inline void butterfly(Complex<T> (&z)[8]) {
  constexpr T kHalfRoot = static_cast<T>(0.707106781186547524400844362104849039);
  Complex<T> even[4] = {z[0], z[2], z[4], z[6]}, odd[4] = {z[1], z[3], z[5], z[7]};
  butterfly<kInverse>(even);
  butterfly<kInverse>(odd);
  odd[1] = scaled(kHalfRoot, odd[1] + quarter<kInverse>(odd[1]));
  odd[2] = quarter<kInverse>(odd[2]);
  odd[3] = scaled(kHalfRoot, quarter<kInverse>(odd[3]) - odd[3]);
  for (int k = 0; k < 4; ++k) {
    z[k] = even[k] + odd[k];
    z[k + 4] = even[k] - odd[k];
  }
}
