"""Lower bounds of communication: what no distribution of a product over devices can avoid."""

from __future__ import annotations

from math import sqrt

__all__ = ["matmul_words"]


def matmul_words(a: int, b: int, c: int, devices: int, memory: float) -> float:
    """Words that some device has to send or receive to multiply an a x b by a b x c matrix.

    The work is dealt out evenly over ``devices``, and one copy of the operands and of the result
    lies over them, in whatever way. With m >= n >= k the sizes in order, and P devices, it is
    D - (m n + m k + n k) / P, where D is

    * (m n + m k) / P + n k                for P <= m / n,
    * m n / P + 2 (m n k^2 / P)^(1/2)      for P <= m n / k^2,
    * 3 (m n k / P)^(2/3)                  above that

    (Al Daas, Ballard, Grigori, Kumar and Rouse, "Tight memory-independent parallel matrix
    multiplication communication lower bounds", SPAA 2022, theorem 3); and no less than
    2 m n k / (P sqrt(M)) - 4 M with memory for M words, which may hold M words before and after
    (Smith, Lowery, Langou and van de Geijn, "A tight I/O lower bound for matrix multiplication",
    arXiv 1702.02017). Above a few devices' memory the second never exceeds the first.

    Args:
        a: rows of the first matrix.
        b: its columns.
        c: columns of the second.
        devices: P.
        memory: words of a device.
    """
    m, n, k = sorted((a, b, c), reverse=True)
    p = devices
    if p * n <= m:
        d = (m * n + m * k) / p + n * k
    elif p * k * k <= m * n:
        d = m * n / p + 2 * sqrt(m * n * k * k / p)
    else:
        d = 3 * (m * n * k / p) ** (2 / 3)
    free = d - (m * n + m * k + n * k) / p
    limited = 2 * m * n * k / (p * sqrt(memory)) - 4 * memory
    return max(free, limited, 0.0)
