"""A whole index as plain data: tables, statistics, a digest, and the check of its invariants."""
