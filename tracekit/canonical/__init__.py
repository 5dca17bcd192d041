"""From an engine's physical layout to the logical words of the model, and back; pure functions."""
