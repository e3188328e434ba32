"""Kernels: loops over the rows of a batch, for the embedding table, the losses and the optimisers.

numpy needs several passes for each of them, and on small batches the overhead of a call exceeds the
arithmetic. So the kernels are written in C (native.c) and compiled when vafl is installed. Without a
compiler, portable.py does the same in numpy. It also documents each kernel.
"""

try:
    from vafl.kernels.native import (
        add_row,
        count_delays,
        gather,
        gather_sums,
        softmax,
        store,
        store_summed,
        sum_rows,
    )

    NATIVE = True
except ImportError:  # the C extension was not compiled
    from vafl.kernels.portable import (
        add_row,
        count_delays,
        gather,
        gather_sums,
        softmax,
        store,
        store_summed,
        sum_rows,
    )

    NATIVE = False

__all__ = ["NATIVE", "add_row", "count_delays", "gather", "gather_sums", "softmax", "store", "store_summed"]
__all__ += ["sum_rows"]
