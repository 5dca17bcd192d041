"""Small scans that show the mechanism behind an entry of docs/findings.md."""
