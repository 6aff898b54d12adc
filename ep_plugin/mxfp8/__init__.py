"""MXFP8 expert parallelism: codec, expert GEMMs, and the autograd node of a whole MoE step."""
