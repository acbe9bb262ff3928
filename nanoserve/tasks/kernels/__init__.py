"""Timing of attention kernels at given shapes: what ``task=bench_kernels`` and ``task=tune`` share."""
