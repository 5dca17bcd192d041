"""A training run and a rollout run over real processes, for `tracekit bind` (docs/binding.md)."""
