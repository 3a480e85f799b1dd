"""What floating point may add to one example's contribution: the rho of ``B_C = C (1 + rho)``, the sensitivity.

In exact arithmetic an example contributes ``g_i min(1, C / ||g_i||)``, of norm at most C. In floating point

- the norm that the factor divides by is never below that of what the sum adds for the example, up to the float64 sum
  of squares: a relative 1e-9 for 1e8 values, and the factor is rounded down. Either the norm is of the very numbers
  that are added, in whatever precision these were computed, or it is raised by all that rounding, overflow and
  underflow can add to them;
- sums over examples accumulate in float64. Adding one example can change how all others are rounded. Most layers add
  one value an example, at most C, to each entry of the sum: with and without one of n, below ``2^-52 n^2 C``. So does
  the linear layer's weight in float32, whose products of one example are summed in float32 before they meet another's.
  With few positions, and in float64, it adds an example's positions one by one, and these may be large and cancel: k
  terms round by ``2^-53 k w S`` with ``S = sum_t ||a_t|| ||g_t||``. Its norms are at least ``2^-22 k S``, so that this
  is below ``2^-31 C`` even for an adversarial example; with and without one, for n examples, below ``1e-9 n C``.

rho = 2^-10 covers all of it up to 600,000 examples in one logical batch, at 0.1% more noise.
"""

RHO = 2.0**-10


def l2_bound(max_grad_norm: float) -> float:
    """Largest L2 norm by which one example can change a clipped sum, rounding included."""
    return max_grad_norm * (1 + RHO)
