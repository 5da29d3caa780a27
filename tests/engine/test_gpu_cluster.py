"""The cluster of one worker a GPU: what it is asked for is what the installed dask-cuda takes."""

from __future__ import annotations

import inspect

import pytest

from dl2gpu.cluster import cuda_options


@pytest.mark.parametrize("workers", [None, 2])
def test_options_of_the_cuda_cluster(workers: int | None) -> None:
    dask_cuda = pytest.importorskip("dask_cuda", reason="needs one of the gpu extras")
    inspect.signature(dask_cuda.LocalCUDACluster).bind(**cuda_options(workers))
