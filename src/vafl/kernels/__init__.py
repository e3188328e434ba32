"""Loops over the rows of a batch: what the server does to its table, and a loss to its scores.

For each of them numpy needs several passes, and goes as often through its own set-up, which on small batches
takes longer than the arithmetic. So they are written in C (native.c) and compiled when vafl is installed.
Where there was no compiler, numpy does the same: portable.py, which also says what each of them means.
"""

try:
    from vafl.kernels.native import (
        add_row,
        all_finite,
        count_delays,
        descend,
        gather,
        gather_delays,
        gather_sums,
        in_order,
        softmax,
        store,
        store_summed,
        sum_rows,
    )

    NATIVE = True
except ImportError:  # it was not compiled
    from vafl.kernels.portable import (
        add_row,
        all_finite,
        count_delays,
        descend,
        gather,
        gather_delays,
        gather_sums,
        in_order,
        softmax,
        store,
        store_summed,
        sum_rows,
    )

    NATIVE = False

__all__ = ["NATIVE", "add_row", "all_finite", "count_delays", "descend", "gather", "gather_delays"]
__all__ += ["gather_sums", "in_order", "softmax", "store", "store_summed", "sum_rows"]
