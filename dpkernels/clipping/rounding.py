"""What floating point may add to one example's contribution: the rho of ``B_C = C (1 + rho)``, the sensitivity.

In exact arithmetic an example contributes ``g_i min(1, C / ||g_i||)``, of norm at most C. In floating point

- the norm that the factor divides by is never below the true one (each operator rounds upward), up to the float64 sum
  of squares: a relative 1e-9 for 1e8 values, and the factor is rounded down;
- sums over examples accumulate in float64, in chains of at most 2^12 additions (tiles of 128 rows, then tiles). Adding
  one example can change the rounding of all others: by at most ``2 * 2^12 * 2^-53 * sum_i w_i S_i``, with
  ``S_i = sum_t ||a_t|| ||g_t||``. The upward term of the norms, at least ``6 u S_i^2`` with u = 2^-24, caps ``w_i S_i``
  at 1,700 C even for an adversarial example. For n examples in a logical batch this is below ``1.6e-9 n C``.

rho = 2^-10 covers all of it up to 600,000 examples in one logical batch, at 0.1% more noise.
"""

RHO = 2.0**-10


def l2_bound(max_grad_norm: float) -> float:
    """Largest L2 norm by which one example can change a clipped sum, rounding included."""
    return max_grad_norm * (1 + RHO)
