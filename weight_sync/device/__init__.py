"""Live parameters on GPUs: a digest that a GPU computes at memory speed, and kernels that work on thousands of regions at once.

lanes: what the digest is. tables: strided regions as the tables that a launch reads. kernels: Triton; needs torch and triton.
"""
