"""What this repository costs on this machine, one command a package; run from the checkout, in no wheel.

`python -m benchmarks.prefix_index`, `.slab_pool`, `.kernels`, `.engine` print one JSON object each. How they measure is
in `timing`, their options and output in `command`.
"""
