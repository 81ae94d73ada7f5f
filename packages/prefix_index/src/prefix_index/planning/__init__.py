"""Decisions as pure functions: costs, admission, taps, coalescing."""
