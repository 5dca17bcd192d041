"""How the stateful tests look for a planted fault: the same search every time, and nothing kept of it."""

from typing import Any

from hypothesis import Phase, settings


def searching(max_examples: int, steps: int, **more: Any) -> settings:
    """Return settings of a search that ends with the first failure, unshrunk."""
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        print_blob=False,
        **more,
    )
