"""What is kept and what goes: pins, values, the orders of eviction, and giving up."""
