"""A real pair for `tracekit bind`: Megatron-core trains, vLLM serves the same weights (docs/binding.md)."""
