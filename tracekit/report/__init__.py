"""Reports made from verdicts: terminal and JSON."""
