"""The table of predictions: what stored plans come to, and what searches choose, kept number by number."""
