// The arithmetic of one value, in double, shared by the CPU and the device. Included inside a namespace, hence without
// an include guard, after
//
//   double multiply_add(double a, double b, double c)    a b + c, in one rounding where the machine has an FMA
//
// Every product that may be fused with a sum goes through it, so that no compiler has a choice left and all machines
// with an FMA write the same bits.

// round(sum / grid) grid / denominator with the integer `noise` added. Sums beyond 2^51 units are moved there.
DPK_HOST_DEVICE static inline double noised_mean(double sum, double noise, double per_grid, double unit) {
  constexpr double kShift = 0x1.8p52, kLimit = 0x1p51;
  double x = sum * per_grid;
  x = x < -kLimit ? -kLimit : x;
  x = x > kLimit ? kLimit : x;
  return (((x + kShift) - kShift) + noise) * unit;
}

DPK_HOST_DEVICE static inline double decayed(const UpdateTensor& t, double mean, double parameter) {
  return multiply_add(t.decay, parameter, mean);
}

// The momentum buffer after gradient g.
DPK_HOST_DEVICE static inline double sgd_momentum(const UpdateTensor& t, double buffer, double g) {
  return t.overwrite_first ? g : multiply_add(t.keep_first, buffer, t.add_first * g);
}

DPK_HOST_DEVICE static inline double sgd_parameter(const UpdateTensor& t, double parameter, double g, double momentum) {
  return multiply_add(-t.rate, t.nesterov ? multiply_add(t.keep_first, momentum, g) : momentum, parameter);
}

DPK_HOST_DEVICE static inline double adam_first(const UpdateTensor& t, double first, double g) {
  return multiply_add(t.keep_first, first, t.add_first * g);
}

DPK_HOST_DEVICE static inline double adam_second(const UpdateTensor& t, double second, double g) {
  return multiply_add(t.keep_second, second, (1 - t.keep_second) * g * g);
}

// root: the square root of the second moment, or of its maximum.
DPK_HOST_DEVICE static inline double adam_parameter(const UpdateTensor& t, double parameter, double first,
                                                    double root) {
  return multiply_add(t.shrink, parameter, -(t.rate * first / multiply_add(root, t.second_unbias, t.epsilon)));
}
