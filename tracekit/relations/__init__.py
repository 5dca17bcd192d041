"""Claims, one a file: variants of a call whose answers must agree."""
