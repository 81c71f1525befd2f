"""Quantised transfer: schemes, the kernels that carry them out at the source, and their float64 reference.

scheme and published are pure; kernel is the one interface of all kernels. Imports no transport and no session.
"""
